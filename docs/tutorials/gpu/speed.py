"""
Speed on a GPU
==============

This tutorial runs one model in bf16 and in FP8, eager and compiled. It shows the time and memory of a step, and the
time of each kernel. The speed-up of *your* model depends on its shapes. Change the numbers below and run it again.
"""

# %%
# The machine
# -----------

import statistics

import torch
import torchao
import triton
from torch.profiler import ProfilerActivity, profile
from torchao.quantization import quantize_
from transformers import LlamaConfig, LlamaForCausalLM

from torchao_blockwise import BlockwiseFP8TrainingConfig, fuse, skip_lm_head

print(torch.cuda.get_device_name())
print(f"torch {torch.__version__}, torchao {torchao.__version__}, Triton {triton.__version__}")

# %%
# Four layers of Llama 3 8B
# -------------------------
#
# A step reads 8192 tokens. Parameters are bf16 in every variant. FP8 quantizes them when a GEMM reads them.

BATCH, LENGTH = 4, 2048
SHAPE = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
)
tokens = torch.randint(SHAPE.vocab_size, (BATCH, LENGTH), device="cuda")


def make(fp8=False, fused=False, compiled=False):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(SHAPE).bfloat16()
    if fp8:
        quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=skip_lm_head())
    if fused:
        fuse(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# %%
# Timing
# ------
#
# The first steps compile kernels and are left out. The result is the median of 20 steps, measured with events on the
# GPU.


def milliseconds(step, steps=20):
    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


VARIANTS = {
    "bf16": {},
    "FP8": {"fp8": True},
    "FP8, fused": {"fp8": True, "fused": True},
    "bf16, compiled": {"compiled": True},
    "FP8, compiled": {"fp8": True, "compiled": True},
    "FP8, fused, compiled": {"fp8": True, "fused": True, "compiled": True},
}
reference = {}
print("variant                  ms a step   tokens/s   × bf16   peak GiB")
for name, options in VARIANTS.items():
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make(**options)
    took = milliseconds(step)
    bf16 = reference.setdefault("compiled" in options, took)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name:<24} {took:9.1f} {BATCH * LENGTH / took * 1000:10,.0f} {bf16 / took:8.2f} {peak:10.2f}")
    del step

# %%
# Ratios are relative to bf16 in the same mode, eager or compiled. ``fuse`` lets layers that read the same activation
# share its quantized copies (:doc:`/fusion`). Attention, the head, norms and the optimizer take the same time as in
# bf16, which limits the speed-up of the whole step.

# %%
# Time of each kernel
# -------------------
#
# The table lists the kernels of one FP8 step, starting with the longest. Kernels with ``quantize`` and ``amax`` in
# their name quantize bf16 to 8 bits. Kernels with ``matmul`` are FP8 GEMMs, ``nvjet`` and ``cutlass`` are cuBLAS'
# GEMMs, and ``flash`` or ``cudnn`` is attention.

step = make(fp8=True, fused=True)
milliseconds(step, steps=1)
with profile(activities=[ProfilerActivity.CUDA]) as profiled:
    step()
    torch.cuda.synchronize()
kernels = [event for event in profiled.key_averages() if event.self_device_time_total]
whole = sum(event.self_device_time_total for event in kernels)
print("share   times  kernel")
for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:12]:
    print(f"{event.self_device_time_total / whole:6.1%} {event.count:6}  {event.key[:80]}")
del step

# %%
# Small layers
# ------------
#
# For one layer and few tokens, the GPU finishes before Python launches the next kernel, and FP8 launches more kernels.

for width, rows in ((512, 512), (1024, 2048), (4096, 8192)):
    layer = {name: torch.nn.Linear(width, 4 * width, bias=False, device="cuda").bfloat16() for name in ("bf16", "FP8")}
    quantize_(layer["FP8"], BlockwiseFP8TrainingConfig())
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, 4 * width, device="cuda", dtype=torch.bfloat16)
    took = {name: milliseconds(lambda module=module: module(x).backward(dy)) for name, module in layer.items()}
    print(f"{rows} tokens, {width} → {4 * width}: bf16 {took['bf16']:.3f} ms, FP8 {took['FP8']:.3f} ms")

# %%
# If GEMMs are too small, leave layers in bf16 (``min_features``), or use a CUDA graph: :doc:`cuda_graphs`. The limits
# of each kernel and the speed of larger models are in :doc:`/performance` and :doc:`/kernels`.
