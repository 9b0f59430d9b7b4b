"""
``weights_unchanged``: microbatches, evaluation, CUDA graphs
============================================================

A converted layer quantizes its weight in each forward pass and again in backward. It keeps no quantized copy, so none
can become stale. If weights do not change for a while, ``weights_unchanged`` quantizes each of them only once.
"""

# %%
# Microbatches of one step
# ------------------------

import time

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, weights_unchanged

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
quantize_(model, BlockwiseFP8TrainingConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
microbatches = torch.randn(8, 16, 1024)


def step():
    for microbatch in microbatches:
        (model(microbatch).square().mean() / len(microbatches)).backward()


step()
gradient = model[0].weight.grad.clone()
optimizer.zero_grad()

with weights_unchanged(model, keep="both"):
    step()
print("the same gradient, bit for bit:", torch.equal(gradient, model[0].weight.grad))
optimizer.step()  # after the scope
optimizer.zero_grad()

# %%
# ``keep="rowwise"``, the default, keeps one byte per parameter, and backward computes the transposed copy. ``"both"``
# keeps two bytes. All copies are freed at the end of the scope. On this CPU, with few rows per microbatch, quantizing
# weights takes much of the time:


def milliseconds(run):
    run()
    start = time.perf_counter()
    for _ in range(3):
        run()
    return (time.perf_counter() - start) / 3 * 1000


def inside(keep):
    with weights_unchanged(model, keep=keep):
        step()


print(f"without the scope   {milliseconds(step):6.0f} ms")
for keep in ("rowwise", "both"):
    print(f"keep={keep!r}".ljust(20), f"{milliseconds(lambda keep=keep: inside(keep)):5.0f} ms")

# %%
# Evaluation and generation
# -------------------------

with weights_unchanged(model), torch.no_grad():
    outputs = [model(microbatch) for microbatch in microbatches]
print(len(outputs), "batches, each weight quantized once")

# %%
# Changes inside the scope
# ------------------------
#
# If the optimizer changes a weight inside the scope, the next GEMM with it raises an error:

optimizer.zero_grad()
try:
    with weights_unchanged(model):
        step()
        optimizer.step()
        step()
except RuntimeError as error:
    print(error)
optimizer.zero_grad()

# %%
# CUDA graphs
# -----------
#
# On a GPU, small layers are limited by host overhead. A CUDA graph replays the kernels of a whole step without Python.
# A replay quantizes the *current* weights, so the optimizer may change them between replays, even if the graph was
# captured inside the scope. :doc:`/gpu/cuda_graphs` captures a whole step and compares it with eager mode.
#
# ``torch.compile(model, mode="reduce-overhead")`` creates CUDA graphs automatically. :doc:`/compile` compares the
# methods.
