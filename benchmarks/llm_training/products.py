"""bf16 GEMMs on processors that have no instructions for them: in fp32, on the same operands.

There PyTorch multiplies bf16 three to thirty times slower than fp32. The product of two bf16 numbers is exact in
fp32, so only the order of the sums differs from that of a bf16 product, which is rounded once as well.
"""

from __future__ import annotations

import contextlib
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Each with the number of its results that are rounded back. The attention's second product takes probabilities that
# a bf16 kernel rounds and these do not.
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.addmm.default: 1,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._grouped_mm.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


def computed_in(precision: str) -> contextlib.AbstractContextManager:
    """Where bf16 GEMMs, forward and backward, are computed in `precision` and rounded to bf16."""
    return _InFp32() if precision == "fp32" else contextlib.nullcontext()


class _InFp32(TorchDispatchMode):
    """Redoes in fp32 what a step multiplies in bf16, wherever in the model and in autograd it does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rounded = _PRODUCTS.get(func)
        if rounded is None or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        out = func(*(a.float() if _is_bf16(a) else a for a in args), **kwargs)
        if isinstance(out, torch.Tensor):
            return out.bfloat16()
        return tuple(x.bfloat16() if i < rounded else x for i, x in enumerate(out))


def _is_bf16(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def pick() -> str:
    """The precision to compute bf16 GEMMs in on this machine, by a probe: bf16, unless fp32 is twice as fast."""
    x, weight, grad = (torch.ones(256, 256, dtype=torch.bfloat16) for _ in range(3))

    def seconds(precision: str) -> float:
        with computed_in(precision):
            start = time.perf_counter()
            # A layer's three GEMMs: where bf16 is slow, their layouts differ tenfold in speed.
            _ = x @ weight.T, grad @ weight, grad.T @ x
            return time.perf_counter() - start

    # The shortest of several: others may use the processor meanwhile.
    bf16, fp32 = (min(times) for times in zip(*((seconds("bf16"), seconds("fp32")) for _ in range(5))))
    return "fp32" if bf16 >= 2 * fp32 else "bf16"
