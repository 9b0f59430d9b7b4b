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
from torchao_blockwise.formats import Copies
from torchao_blockwise.nn.activations import Input, as_rows
from torchao_blockwise.nn.gemms import GemmSpec, quantize
from torchao_blockwise.nn.layer import Layer, cast_for_compute, linear, profiled
from torchao_blockwise.nn.weights import Weight, check_linear, config_of, rounding_key_of
from torchao_blockwise.tensors import TrainingConfig


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
        offered = _Offer(self, x, config_of(weights[0]), len(weights), trained)
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
            # The input itself, not a view of it: so gradients of all its readers are summed in the same order.
            x = offered.x
            check_linear(x, weight, bias)
            spec, copies = offered.take()
            if offered.left == 0:
                self.withdraw()
            key, saves = rounding_key_of(weight), torch.is_grad_enabled()
            return Layer.apply("linear", Input, spec, weight, bias, key, None, copies, saves, x)

    def _offer_of(self, x: torch.Tensor) -> _Offer | None:
        """The offer whose input `x` is, or None."""
        if torch.compiler.is_compiling():
            carried = getattr(x, "offered_input", None)
            return carried if carried is not None and carried.to is self else None
        offered = self._offered
        return offered if offered is not None and offered.x is x else None


class _Offer:
    """An input of several layers, and its copies as soon as the first of them asks."""

    def __init__(self, to: SharedInput, x: torch.Tensor, config: TrainingConfig, layers: int, trained: bool) -> None:
        self.to, self.x, self.config, self.left, self.trained = to, x, config, layers, trained
        self._taken: tuple[GemmSpec, Copies] | None = None

    def take(self) -> tuple[GemmSpec, Copies]:
        """The spec of the layers, and the copies; the columnwise one is there if a layer saves it."""
        self.left -= 1
        if self._taken is None:
            x, config = cast_for_compute(self.x.detach()), self.config
            spec = GemmSpec(None, config, x.dtype, config.out_dtype or x.dtype)
            columnwise = self.trained and config.saves_quantized_activations
            with profiled("shared_input", "quantize"):
                self._taken = spec, quantize(as_rows(x), spec, rowwise=True, columnwise=columnwise)
        return self._taken
