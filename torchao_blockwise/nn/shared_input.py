"""One input, one quantization: linear layers that read the same activation share its copies.

    first of them   x ──one read─▶ rowwise, and columnwise if a weight of them is trained
    each of them    rowwise · wᵀ = output; saved for backward: the one columnwise copy

Each layer keeps its own node in autograd's graph. So gradients are computed, and summed, as they are without sharing.

In eager mode the module remembers what it offers. A compiler refuses a checkpointed region that changes an object from
outside of it. So in compiled code a view of the input, made inside of the region, carries the offer.
"""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import Copies, Operand
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.contraction import output, quantize
from torchao_blockwise.nn.linear_layer import linear, linear_gradients
from torchao_blockwise.nn.observation import seen
from torchao_blockwise.nn.weight_products import Contraction, Readable
from torchao_blockwise.nn.weights import Weight, check_linear, config_of, rounding_key_of


class SharedInput:
    """What layers that share their input know of it: nothing, or while a forward pass runs what it was given.

    An input is known by identity, in compiled code by the offer that it carries. A layer that is called with another
    tensor quantizes that one.
    """

    def __init__(self) -> None:
        self._offered: _Offer | None = None

    def offer(self, x: torch.Tensor, weights: list[Any]) -> torch.Tensor:
        """What to call layers of these weights with, which train by one config: they share copies of `x`, each once."""
        # Else each thing that is read of a weight goes through Python.
        with _compat.no_torch_function():
            trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        offered = _Offer(self, x, Contraction(config_of(weights[0])), len(weights), trained)
        if torch.compiler.is_compiling():
            carrier = x.view_as(x)
            carrier.offered_input = offered  # type: ignore[attr-defined]
            return carrier
        self._offered = offered
        return x

    def withdraw(self) -> None:
        """Forget the input; the copies go when the last layer has taken them, if that is before."""
        if not torch.compiler.is_compiling():
            self._offered = None

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear(x, weight, bias)`, by the shared copies where `x` is what was offered."""
        offered = self._offer_of(x)
        if offered is None:
            return linear(x, weight, bias)
        with _compat.no_torch_function():
            # Of the input itself, not of a view of it: so gradients of all who read it are summed in the same order.
            x = offered.x
            check_linear(x, weight, bias)
            copies = offered.take()
            if offered.left == 0:
                self.withdraw()
            return steps.apply(_LinearOfCopies, x, weight, bias, offered.how, copies, rounding_key_of(weight))

    def _offer_of(self, x: torch.Tensor) -> _Offer | None:
        """The offer whose input `x` is, or None."""
        if torch.compiler.is_compiling():
            carried = getattr(x, "offered_input", None)
            return carried if carried is not None and carried.to is self else None
        offered = self._offered
        return offered if offered is not None and offered.x is x else None


class _Offer:
    """An input of so many layers, and its copies as soon as the first of them asks."""

    def __init__(self, to: SharedInput, x: torch.Tensor, how: Contraction, layers: int, trained: bool) -> None:
        self.to, self.x, self.how, self.left, self.trained = to, x, how, layers, trained
        self._taken: tuple[Any, ...] | None = None

    def take(self) -> tuple[Any, ...]:
        """(rowwise copy, the tensors that a layer saves to train its weight, the dtype that was quantized)."""
        self.left -= 1
        if self._taken is None:
            x = steps.cast_for_compute(self.x.detach())
            save_quantized = self.trained and self.how.config.saves_quantized_activations
            rowwise, columnwise = steps.named(_copies, x, self.how, save_quantized)
            self._taken = rowwise, columnwise.tensors if save_quantized else (x,), x.dtype
        return self._taken


class _LinearOfCopies(torch.autograd.Function):
    """`linear` of an input that is quantized already; backward is the same."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: Contraction,
        copies: tuple[Any, ...],
        rounding_key: torch.Tensor | None,
    ) -> torch.Tensor:
        rowwise, saved_x, dtype = copies
        out = steps.named(_forward, weight, x, rowwise, bias, how, how.config.out_dtype or dtype)
        steps.save_for_backward(ctx, (weight,), rounding_key, *(saved_x if ctx.needs_input_grad[1] else ()))
        ctx.how, ctx.x_shape, ctx.dtypes, ctx.x_dtype = how, x.shape, (dtype, weight.dtype), x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.places = None
        ctx.seen = seen(weight, lambda: x.to(dtype), how)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight, grad_bias = linear_gradients(ctx, grad_output)
        return None if grad_x is None else grad_x.to(ctx.x_dtype), grad_weight, grad_bias, None, None, None


def _copies(x: torch.Tensor, how: Contraction, columnwise: bool) -> Copies:
    return quantize(steps.as_rows(x), how, rowwise=True, columnwise=columnwise)


def _forward(
    weight: Readable, x: torch.Tensor, rowwise: Operand, bias: torch.Tensor | None, how: Contraction, dtype: torch.dtype
) -> torch.Tensor:
    return steps.as_shape_of(output(rowwise, weight, how, dtype, bias), x)
