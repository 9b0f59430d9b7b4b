"""Who sees the tensors that layers quantize: nobody, or an observer such as the numerics monitor.

A layer tells an observer of each activation beside the weight that it is multiplied by, in a forward pass, and of the
gradient in backward. Where nobody looks that is one question a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from torchao_blockwise.nn.weight_products import Contraction

# What takes the gradient of a layer's output [T, N]; called once in the backward of the pass that it was made in.
SeesGradient: TypeAlias = Callable[[torch.Tensor], None]


class Observer(Protocol):
    """What `observe` takes."""

    def __call__(self, weight: Any, x: torch.Tensor, how: Contraction) -> SeesGradient | None:
        """x: [T, K] as it is quantized for the product with `weight`, by `how`."""


_observer: Observer | None = None


def observe(observer: Observer | None) -> Observer | None:
    """Let `observer` see what layers quantize from now on, in eager mode, or nobody; returns who saw it before."""
    global _observer
    before, _observer = _observer, observer
    return before


def seen(weight: Any, x: torch.Tensor | Callable[[], torch.Tensor], how: Contraction) -> SeesGradient | None:
    """Tell the observer of `x` [.., K], or of what `x()` gives, where a fused layer has it nowhere in memory.

    Returns what is to see the gradient, None where nobody looks.
    """
    if _observer is None or torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        values = x if isinstance(x, torch.Tensor) else x()
        return _observer(weight, values.detach().flatten(0, -2) if values.dim() > 1 else values.detach()[None], how)
