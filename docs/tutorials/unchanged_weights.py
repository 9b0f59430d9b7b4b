"""
While weights stand still: microbatches, evaluation, CUDA graphs
================================================================

A converted layer quantizes its weight in each forward pass and again in backward, and keeps nothing: so no copy can be
old. Where weights do not change for a while, say so, and each is quantized once.
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
# ``keep="rowwise"``, the default, keeps one byte a parameter, and backward quantizes anew; ``"both"`` keeps two bytes.
# Both are freed at the end. On this CPU, with few rows a microbatch, quantizing weights is much of the time:


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
# A change inside is an error
# ---------------------------
#
# The scope is a promise. A change that can be seen is refused, with the name of the weight:

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
# On a GPU small layers wait for Python. A CUDA graph replays the kernels of a whole step without it. A replay
# quantizes the weights as they are *then*, so the optimizer may change them in between; a graph that is captured
# inside the scope keeps no copies. :doc:`/gpu/cuda_graphs` captures a whole step, and compares it with an eager one.
#
# ``torch.compile(model, mode="reduce-overhead")`` makes graphs by itself. :doc:`/compile` has all ways, and what they
# are worth.
