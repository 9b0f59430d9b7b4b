"""Modules of a model whose linear layers share their input, and MLPs that quantize their SwiGLU as they compute it.

A module gets a class derived from its own, as a converted linear layer does. Its forward pass offers its input to the
layers inside, which take the copies from there (shared_input.py); then the model's own forward pass runs. What a layer
is and holds is asked in every forward pass: where it does not fit, the layer quantizes what it is given.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._compat.module_hooks import runs_alone
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.nn.shared_input import SharedInput
from torchao_blockwise.nn.swiglu_layer import swiglu_linear
from torchao_blockwise.nn.weights import WEIGHTS, are_plain, config_of, is_fp8_weight


class Fusion(NamedTuple):
    """What is fused in a module, by names.

    readers: the layers that read the input, whose name is `argument` and which the forward pass takes first.
    shared_input: what those layers know of it.
    down, act: of an MLP, the layer behind SwiGLU, and the activation, "" if it is no module; without a `down` SwiGLU is
        the model's own.
    """

    readers: tuple[str, ...]
    argument: str
    shared_input: SharedInput
    down: str = ""
    act: str = ""


class FusedModule(nn.Module):
    """What `fuse_class` adds to a module: layers inside share the input of its forward pass.

    An MLP, down(silu(gate(x)) · up(x)), also quantizes h = silu(gate) · up in the pass that computes it.
    fused_from: the class that it had.
    """

    fused_from: type
    fusion: Fusion

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        fusion = self.fusion
        if args:
            args = (self.offer(args[0]), *args[1:])
        elif fusion.argument in kwargs:
            kwargs[fusion.argument] = self.offer(kwargs[fusion.argument])
        try:
            if not fusion.down or len(args) != 1 or kwargs or why_not_swiglu(self) is not None:
                return super().forward(*args, **kwargs)
            gate, up = (getattr(self, name)(args[0]) for name in fusion.readers)
        finally:
            fusion.shared_input.withdraw()
        down = getattr(self, fusion.down)
        return swiglu_linear(gate, up, down.weight, down.bias)

    def offer(self, x: Any) -> Any:
        """What to hand the readers for `x`: they share copies of it until it is withdrawn, if that is right."""
        if not isinstance(x, torch.Tensor) or not are_plain(x) or x.dtype not in HIGH_PRECISION_DTYPES:
            return x
        if why_not_shared(self) is not None:
            return x
        fusion = self.fusion
        return fusion.shared_input.offer(x, [getattr(self, name).weight for name in fusion.readers])

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        # A class that another wrapper derived from this one is its own affair.
        if type(self) is not _class_of(self.fused_from):
            return reduced
        return _rebuild, (self.fused_from,), *reduced[2:]


def why_not_shared(module: FusedModule) -> str | None:
    """Why layers of `module` do not share their input as they are now, or None if they do."""
    fusion, config = module.fusion, None
    for name in fusion.readers:
        layer = getattr(module, name)
        if layer.__dict__.get("shared_input") is not fusion.shared_input:
            return f"{name} was replaced, or another module has it too"
        weight = getattr(layer, "weight", None)
        if (reason := _why_not_layer(name, layer, weight)) is not None:
            return reason
        if config is not None and config_of(weight) != config:
            return f"{name} has another config than {fusion.readers[0]}"
        config = config_of(weight)
    return None


def why_not_swiglu(module: FusedModule) -> str | None:
    """Why `module` runs its activation and `down` one after the other as it is now, or None if it does not."""
    fusion = module.fusion
    down, act = getattr(module, fusion.down), getattr(module, fusion.act) if fusion.act else None
    if (reason := _why_not_layer(fusion.down, down, getattr(down, "weight", None))) is not None:
        return reason
    if act is not None and (not hugging_face.is_silu(act) or not runs_alone(act)):
        return f"{fusion.act} is a {type(act).__name__}, or has hooks"
    return None if is_fp8_weight(down.weight) else f"{fusion.down} trains in NVFP4, which needs a whole tensor's amax"


def _why_not_layer(name: str, layer: nn.Module, weight: Any) -> str | None:
    if type(layer).forward is not ConvertedLinear.forward:
        return f"{name} is not converted" if isinstance(layer, nn.Linear) else f"{name} is a {type(layer).__name__}"
    if not (isinstance(weight, WEIGHTS) and are_plain(layer.bias)):  # type: ignore[arg-type]
        is_shard = _compat.local_of(weight) is not weight
        return f"the weight of {name} is a {'shard' if is_shard else type(weight).__name__}"
    return None if runs_alone(layer) else f"{name} has hooks, or a forward pass of its own"


def fuse_class(module: nn.Module, readers: tuple[str, ...], *, down: str = "", act: str = "") -> None:
    """Let the linear layers of these names in `module` share its first argument; they are all that read it.

    down, act: of an MLP with SwiGLU, to be quantized as it is computed.
    """
    own: Any = type(module)
    module.__class__ = _class_of(own)
    fusion = Fusion(readers, list(inspect.signature(own.forward).parameters)[1], SharedInput(), down, act)
    module.fusion = fusion  # type: ignore[assignment]
    for name in readers:
        getattr(module, name).shared_input = fusion.shared_input


def restore_module(module: FusedModule) -> None:
    """Give `module` the class back that it had before `fuse_class`; one that others derived stays as it is."""
    if type(module) is not _class_of(module.fused_from):
        return
    for layer in module.modules():
        # One that was wrapped since is further inside.
        if layer.__dict__.get("shared_input") is module.fusion.shared_input:
            del layer.shared_input
    del module.fusion
    module.__class__ = module.fused_from


@functools.cache
def _class_of(base: Any) -> Any:
    # Code of its own: compilers count recompilations, of which they do a few, by that.
    shared: Any = FusedModule.forward
    forward: Any = types.FunctionType(shared.__code__.replace(), shared.__globals__, closure=shared.__closure__)
    # Who hands arguments on (torchtitan's sharding plans) reads there what they are called.
    forward.__signature__ = inspect.signature(base.forward)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (FusedModule, base), {**names, "forward": forward, "fused_from": base})


def _rebuild(base: type) -> nn.Module:
    cls = _class_of(base)
    return cls.__new__(cls)
