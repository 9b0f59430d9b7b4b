"""Modules whose linear layers share their input, and MLPs that quantize SwiGLU in the kernel that computes it.

    first layer   x ──one read─▶ rowwise, and columnwise if a weight of the layers is trained
    each layer    rowwise · wᵀ = output; saved for backward: the shared columnwise copy

A module gets a subclass of its class, like a converted linear layer. Its forward pass calls the original one with a
view of the input that carries the copies. A layer that is called with another tensor quantizes that tensor. Every
forward pass checks the layers and their weights. Each layer keeps its own node in the autograd graph, so gradients are
computed and summed as without sharing.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._compat.modes import runs_alone
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, Copies
from torchao_blockwise.nn.activations import as_rows
from torchao_blockwise.nn.converted import ConvertedLinear, DerivedModule, derived_class
from torchao_blockwise.nn.gemms import GemmSpec, cast_options, quantize
from torchao_blockwise.nn.layer import profiled
from torchao_blockwise.nn.swiglu_layer import swiglu_linear
from torchao_blockwise.nn.weights import WEIGHTS, are_plain, config_of, is_fp8_weight
from torchao_blockwise.tensors.config import QUANTIZED


class SharedInput:
    """The input of several layers, with its copies: the attribute `shared_input` of the tensor that they are called
    with.

    layers: how many layers have not run yet. trained: whether one of their weights is trained.
    """

    def __init__(self, x: torch.Tensor, layers: int, trained: bool) -> None:
        self.x, self.layers, self.trained = x, layers, trained
        self._copies: Copies | None = None

    def take(self, x: torch.Tensor, spec: GemmSpec) -> Copies:
        """Return the copies of `x`, which is the input cast to `spec.dtype`; columnwise only if a layer saves it."""
        copies = self._copies
        if copies is None:
            columnwise = self.trained and spec.config.save_activations == QUANTIZED
            with profiled("shared_input", "quantize"):
                copies = quantize(as_rows(x.detach()), spec, cast_options(spec.config, True, columnwise), "")
        self.layers -= 1
        self._copies = copies if self.layers > 0 else None
        return copies


class Fusion(NamedTuple):
    """The names of the fused layers of a module.

    readers: the layers that read the input. argument: the name of the input, the first argument of the forward pass.
    down, act: for an MLP, the layer after SwiGLU, and the activation ("" if it is not a module). If `down` is "", the
        model's own code computes SwiGLU.
    """

    readers: tuple[str, ...]
    argument: str
    down: str = ""
    act: str = ""


class FusedModule(DerivedModule):
    """A module whose layers share the input of its forward pass; see `fuse_class`.

    An MLP, down(silu(gate(x)) · up(x)), can also quantize h = silu(gate) · up in the kernel that computes it.
    known_forward: the forward pass of the original class when the module was fused.
    """

    attributes = ("fusion",)
    fusion: Fusion
    known_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        fusion = self.fusion
        view = self.share(args[0] if args else kwargs.get(fusion.argument))
        if view is not None:
            args, kwargs = ((view, *args[1:]), kwargs) if args else (args, {**kwargs, fusion.argument: view})
        try:
            if not fusion.down or len(args) != 1 or kwargs or why_not_swiglu(self) is not None:
                return super().forward(*args, **kwargs)
            gate, up = (getattr(self, name)(args[0]) for name in fusion.readers)
        finally:
            if view is not None:
                view.shared_input = None  # type: ignore[attr-defined]
        down = getattr(self, fusion.down)
        return swiglu_linear(gate, up, down.weight, down.bias)

    def share(self, x: Any) -> torch.Tensor | None:
        """Return a view of `x` that carries copies for all readers, or None if they do not share."""
        if not isinstance(x, torch.Tensor) or not are_plain(x) or x.dtype not in HIGH_PRECISION_DTYPES:
            return None
        if why_not_shared(self) is not None:
            return None
        weights = [getattr(self, name).weight for name in self.fusion.readers]
        # Otherwise each access to an attribute of a weight runs Python code.
        with _compat.no_torch_function():
            trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        view = x.view_as(x)
        view.shared_input = SharedInput(x, len(weights), trained)  # type: ignore[attr-defined]
        return view


def why_not_shared(module: FusedModule) -> str | None:
    """Return why the layers of `module` currently do not share their input, or None if they do."""
    fusion, config = module.fusion, None
    own: Any = module.derivation[1]
    if own.forward is not module.known_forward:
        return "its forward pass was replaced after fuse"
    for name in fusion.readers:
        layer = getattr(module, name)
        weight = getattr(layer, "weight", None)
        if (reason := _why_not_layer(name, layer, weight)) is not None:
            return reason
        if config is not None and config_of(weight) != config:
            return f"{name} and {fusion.readers[0]} have different configs"
        config = config_of(weight)
    return None


def why_not_swiglu(module: FusedModule) -> str | None:
    """Return why the activation and `down` of `module` currently run separately, or None if they are fused."""
    fusion = module.fusion
    down, act = getattr(module, fusion.down), getattr(module, fusion.act) if fusion.act else None
    if (reason := _why_not_layer(fusion.down, down, getattr(down, "weight", None))) is not None:
        return reason
    if act is not None and (not hugging_face.is_silu(act) or not runs_alone(act)):
        return f"{fusion.act} is a {type(act).__name__}, or has hooks"
    return None if is_fp8_weight(down.weight) else f"{fusion.down} trains in NVFP4, which needs the amax of all of h"


def _why_not_layer(name: str, layer: nn.Module, weight: Any) -> str | None:
    if type(layer).forward is not ConvertedLinear.forward:
        return f"{name} is not converted" if isinstance(layer, nn.Linear) else f"{name} is a {type(layer).__name__}"
    if not (isinstance(weight, WEIGHTS) and are_plain(layer.bias)):  # type: ignore[arg-type]
        is_shard = _compat.local_of(weight) is not weight
        return f"the weight of {name} is a {'shard' if is_shard else type(weight).__name__}"
    return None if runs_alone(layer) else f"{name} has hooks, or a separate forward pass"


def fuse_class(module: nn.Module, readers: tuple[str, ...], *, down: str = "", act: str = "") -> None:
    """Let the linear layers `readers` of `module` share its first argument, which nothing else may read.

    down, act: for an MLP, the layers with which SwiGLU is fused; see `Fusion`.
    """
    own: Any = type(module)
    module.__class__ = _class_of(own)
    argument = list(inspect.signature(own.forward).parameters)[1]
    module.fusion = Fusion(readers, argument, down, act)  # type: ignore[assignment]


@functools.cache
def _class_of(base: Any) -> Any:
    # A separate code object for each class, because compilers limit the number of recompilations of one.
    shared: Any = FusedModule.forward
    forward: Any = types.FunctionType(shared.__code__.replace(), shared.__globals__, closure=shared.__closure__)
    # torchtitan's sharding plans read the names of arguments from the signature.
    forward.__signature__ = inspect.signature(base.forward)
    known: Any = staticmethod(base.forward)
    return derived_class((FusedModule, base), _class_of, base, forward=forward, known_forward=known)
