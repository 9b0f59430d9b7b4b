"""Rooflines: what this GPU reaches in this run, and the least time that a job can take."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.timing import Timing, input_sets, time_runs

_COPY_BYTES, _SMOKE_COPY_BYTES = 2**30, 2**20
_WIDTH, _SMOKE_WIDTH = 8192, 128


class Ceilings(NamedTuple):
    """Measured rates that nothing of its kind exceeds by much.

    copy: TB/s of a large device copy, bytes read plus bytes written. bf16, fp8: TFLOP/s of a large GEMM through
    cuBLASLt, fp8 with one scale a tensor; fp8 is bf16's where fp8 cannot be measured.
    """

    copy: float
    bf16: float
    fp8: float

    def floor_us(self, nbytes: int, flops: int = 0, peak: str = "fp8") -> float:
        """Least microseconds of a job: max(nbytes / copy, flops / peak)."""
        return max(nbytes / (self.copy * 1e6), flops / (getattr(self, peak) * 1e6))

    def speedup(self, flops: int, quantized_bytes: int) -> float:
        """How many times faster than in bf16 `flops` are in fp8, with so many bytes moved to quantize operands."""
        return (flops / self.bf16) / (flops / self.fp8 + quantized_bytes / self.copy)


def measure_ceilings(device: torch.device, *, smoke: bool = False) -> Ceilings:
    """Measure the ceilings on random data; raises RuntimeError where copy or bf16 fails."""
    size, width = (_SMOKE_COPY_BYTES, _SMOKE_WIDTH) if smoke else (_COPY_BYTES, _WIDTH)
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    copies = input_sets(lambda: (random(size // 2048, 1024),), device, 2 * size)
    operands = input_sets(lambda: (random(width, width), random(width, width)), device, 6 * width**2)
    # By the driver and by a kernel, whichever is faster: in a CUDA graph the driver's is the slower one on an H200.
    runs = {"copy": (torch.clone, copies), "copy by a kernel": (torch.neg, copies)}
    runs |= {"bf16": (lambda a, b: a @ b.t(), operands)}
    runs["fp8"] = tensorwise, [(*to_tensorwise(a), *to_tensorwise(b)) for a, b in operands]
    times = time_runs(runs, device, seconds=0.1)
    for name in ("copy", "bf16"):
        if isinstance(times[name], str):
            raise RuntimeError(f"measure_ceilings: {name} failed: {times[name]}")
    flops = 2 * width**3
    rates = {name: flops / t.us / 1e6 for name, t in times.items() if isinstance(t, Timing)}
    copy = min(t.us for name, t in times.items() if "copy" in name and isinstance(t, Timing))
    return Ceilings(copy=2 * size / copy / 1e6, bf16=rates["bf16"], fp8=rates.get("fp8", rates["bf16"]))


def to_tensorwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in e4m3 with one scale: (qdata, contiguous; decode scale)."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = x.abs().amax().float() / largest
    return (x / scale).clamp(-largest, largest).to(torch.float8_e4m3fn).contiguous(), scale


def tensorwise(a, a_scale, b, b_scale) -> torch.Tensor:
    """a · bᵀ of e4m3 operands with one scale each, through cuBLASLt at its fastest."""
    recipe = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), a_scale, recipe, b_scale, recipe, output_dtype=torch.bfloat16, use_fast_accum=True)
