"""One input, one quantization: linear layers that read the same activation share its copies.

    first of them   x ──one read─▶ rowwise, and columnwise if a weight of them is trained
    each of them    rowwise · wᵀ = output; saved for backward: the one columnwise copy

Each layer keeps its own node in autograd's graph. So gradients are computed, and summed, as they are without sharing.
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
from torchao_blockwise.nn.weights import Weight, check_linear, config_of


class SharedInput:
    """What layers that share their input know of it: nothing, or while a forward pass runs what it was given.

    An input is known by identity. A layer that is called with another tensor quantizes that one.
    """

    def __init__(self) -> None:
        self._offered: _Offer | None = None

    def offer(self, x: torch.Tensor, weights: list[Any]) -> None:
        """Let layers of these weights, which train by one config, share copies of `x`, each of them once."""
        # Else each thing that is read of a weight goes through Python.
        with _compat.no_torch_function():
            trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        self._offered = _Offer(x, Contraction(config_of(weights[0])), len(weights), trained)

    def withdraw(self) -> None:
        """Forget the input; the copies go when the last layer has taken them, if that is before."""
        self._offered = None

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear(x, weight, bias)`, by the shared copies where `x` is what was offered."""
        offered = self._offered
        if offered is None or offered.x is not x:
            return linear(x, weight, bias)
        with _compat.no_torch_function():
            check_linear(x, weight, bias)
            copies = offered.take()
            if offered.left == 0:
                self._offered = None
            return steps.apply(_LinearOfCopies, x, weight, bias, offered.how, copies)


class _Offer:
    """An input of so many layers, and its copies as soon as the first of them asks."""

    def __init__(self, x: torch.Tensor, how: Contraction, layers: int, trained: bool) -> None:
        self.x, self.how, self.left, self.trained = x, how, layers, trained
        self._taken: tuple[Any, ...] | None = None

    def take(self) -> tuple[Any, ...]:
        """(rowwise copy, the tensors that a layer saves to train its weight, the dtype that was quantized)."""
        self.left -= 1
        if self._taken is None:
            dtype = steps.compute_dtype(self.x)
            x = self.x.detach().to(dtype)
            save_quantized = self.trained and self.how.config.saves_quantized_activations
            rowwise, columnwise = steps.run((), _copies, x, self.how, save_quantized)
            self._taken = rowwise, columnwise.tensors if save_quantized else (x,), dtype
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
    ) -> torch.Tensor:
        rowwise, saved_x, dtype = copies
        out = steps.run((weight,), _forward, x, rowwise, bias, how, how.config.out_dtype or dtype)
        steps.save_for_backward(ctx, (weight,), *(saved_x if ctx.needs_input_grad[1] else ()))
        ctx.how, ctx.x_shape, ctx.dtypes, ctx.x_dtype = how, x.shape, (dtype, weight.dtype), x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.seen = seen(weight, lambda: x.to(dtype), how)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight, grad_bias = linear_gradients(ctx, grad_output)
        return None if grad_x is None else grad_x.to(ctx.x_dtype), grad_weight, grad_bias, None, None


def _copies(x: torch.Tensor, how: Contraction, columnwise: bool) -> Copies:
    return quantize(steps.as_rows(x), how, rowwise=True, columnwise=columnwise)


def _forward(
    weight: Readable, x: torch.Tensor, rowwise: Operand, bias: torch.Tensor | None, how: Contraction, dtype: torch.dtype
) -> torch.Tensor:
    return steps.as_shape_of(output(rowwise, weight, how, dtype, bias), x)
