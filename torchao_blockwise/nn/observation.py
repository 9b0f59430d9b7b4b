"""Who sees the tensors that layers quantize: nobody, or an observer such as the numerics monitor.

A layer tells an observer of each activation and the weight that it is multiplied by, in a forward pass, and of the
gradient in backward. Where nobody looks that is one question a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchao_blockwise.tensors.weight_uses import note_gemm, note_traced_gemm

if TYPE_CHECKING:
    from torchao_blockwise.nn.gemms import GemmSpec

# What takes the gradient of a layer's output [T, N]; called once in the backward of the pass that it was made in.
SeesGradient: TypeAlias = Callable[[torch.Tensor], None]


# What `observe` takes: called with the weight, x [T, K] as it is quantized for the GEMM with it, and the GEMM's spec.
Observer: TypeAlias = "Callable[[Any, torch.Tensor, GemmSpec], SeesGradient | None]"

_observer: Observer | None = None


def observe(observer: Observer | None) -> Observer | None:
    """Let `observer` see what layers quantize from now on, in eager mode, or nobody; returns who saw it before."""
    global _observer
    before, _observer = _observer, observer
    return before


def observe_gemm(weight: Any, values: Callable[[], torch.Tensor], spec: GemmSpec) -> SeesGradient | None:
    """Tell the observer of a GEMM with `weight`, whose activation `values` computes in high precision, [T, K].

    Returns what is to see the gradient, None where nobody observes.
    """
    if torch.compiler.is_compiling():
        note_traced_gemm()
        return None
    note_gemm(weight)
    if _observer is None:
        return None
    with torch.no_grad():
        return _observer(weight, values().detach(), spec)
