"""Where a step's time goes: its kernels by torch.profiler, sorted into kinds by their names, and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from common.report import markdown
from common.timing import synchronize

# Kernels by what their names hold; the first that fits. Those of torch.compile are named after many operations.
KINDS = {
    "compiled": r"^triton_(poi|red|per)_",
    "attention": r"flash|fmha|sdpa|attention|softmax",
    "optimizer": r"adam|multi_tensor",
    "products": r"gemm|matmul|nvjet|xmma|cutlass|_mm\b|::mm|addmm|cublas|wgmma|_grouped_(nv)?fp\d|^triton_tem_",
    "quantize": r"quant|amax|fp8|nvfp4|float8|_scales?_kernel|_decode_kernel|swiglu",
    "transpose": r"_transpose_(bytes|elements|pairs|quads)|blockwise::transpose",
}
OTHER = "other"
# Of a table: what is multiplied, what low precision costs besides, and the rest.
GROUPS = {"products": ("products",), "quantization": ("quantize", "transpose")}
GROUP_COLUMNS = tuple(f"{group} ms" for group in (*GROUPS, OTHER))
# Rows of each group that a table has.
_ROWS = 12
_NAME = 90


class Kernel(NamedTuple):
    """A kernel of a step, or an operator on a CPU: calls and microseconds a step."""

    name: str
    us: float
    calls: float

    @property
    def kind(self) -> str:
        kinds = (kind for kind, pattern in KINDS.items() if re.search(pattern, self.name, re.IGNORECASE))
        return next(kinds, OTHER)

    @property
    def group(self) -> str:
        return next((group for group, kinds in GROUPS.items() if self.kind in kinds), OTHER)


def kernels_of(step: Callable[[], object], device: torch.device, steps: int = 1) -> list[Kernel]:
    """Return the kernels of `step`, on a CPU the operators and their host time, longest first: the mean of `steps`."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    synchronize(device)
    # Without the host's events a profiled step is hardly slower, and soon read.
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        for _ in range(steps):
            step()
        synchronize(device)
    found: dict[str, tuple[float, float]] = {}
    for event in profile.key_averages():
        if on_gpu and (
            event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False)
        ):
            continue
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us > 0:
            before, calls = found.get(event.key, (0.0, 0.0))
            found[event.key] = before + us / steps, calls + event.count / steps
    return sorted((Kernel(name, *seen) for name, seen in found.items()), key=lambda kernel: -kernel.us)


def group_ms(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Columns of a row: milliseconds a step of each group."""
    return {name: sum(k.us for k in kernels if f"{k.group} ms" == name) / 1e3 for name in GROUP_COLUMNS}


def longest(kernels: Sequence[Kernel]) -> list[dict]:
    return [kernel._asdict() for kernel in kernels[:40]]


def table(title: str, kernels: Sequence[Kernel], us: float) -> str:
    """Where a step of `us` microseconds goes, kernel by kernel, as Markdown under a title."""
    busy = sum(kernel.us for kernel in kernels)
    rows = []

    def add(group: str, name: str, some: Sequence[Kernel]) -> None:
        spent, calls = sum(kernel.us for kernel in some), sum(kernel.calls for kernel in some)
        rows.append((group, name, f"{calls:,.0f}", f"{spent:,.1f}", f"{100 * spent / (busy or 1):.1f}"))

    for group in (*GROUPS, OTHER):
        some = [kernel for kernel in kernels if kernel.group == group]
        add(f"**{group}**", "all", some)
        for kernel in some[:_ROWS]:
            # A pipe would end the cell.
            add(group, f"`{kernel.name[:_NAME].replace('|', '/')}`", [kernel])
        if rest := some[_ROWS:]:
            add(group, f"{len(rest)} more", rest)
    heading = f"### {title}: {us / 1e3:.2f} ms a step, {busy / 1e3:.2f} ms of them in kernels"
    return f"{heading}\n\n{markdown(('group', 'kernel', 'calls a step', 'us a step', '%'), rows, left=2)}"
