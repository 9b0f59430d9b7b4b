"""The class of a converted module, a subclass of its original class.

A converted `nn.Linear` calls `linear` by name. A tensor subclass can override `F.linear` only if it is the outermost
one, and tensor parallelism wraps it in a DTensor, which would decompose `F.linear`.

A module with another forward pass keeps it. Its first call in training and its first call in evaluation check that a
low-precision GEMM ran with each converted weight, because a row lookup or a custom kernel would read the
high-precision values. Experts may have no tokens, so only expert weights that were read must have run one. A compiled
module is checked when it is traced, where one GEMM with any weight is enough.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face, torch_fsdp
from torchao_blockwise.nn.derivatives import refuse_transforms
from torchao_blockwise.nn.layer import linear, local_linear
from torchao_blockwise.nn.weights import WEIGHTS, config_of, is_low_precision
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_uses import key_of, recorded_uses, traced_gemms


class DerivedModule(nn.Module):
    """Base of derived classes. They keep the module and name of the original class, because tracers treat a module in
    torch.nn as a single operation.

    derivation: (function that derives the class, original class).
    attributes: names of the attributes that a derived module has in addition.
    """

    derivation: tuple[Callable[[Any], Any], type]
    attributes: tuple[str, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        derivation = vars(type(self)).get("derivation")
        # If another wrapper derived its class from this one, that wrapper handles pickling.
        return reduced if derivation is None else (_rebuild, derivation[::-1], *reduced[2:])


def restore_class(module: DerivedModule) -> bool:
    """Restore the original class of `module`, unless another wrapper derived its class; return whether it did."""
    if "derivation" not in vars(type(module)):
        return False
    for name in module.attributes:
        module.__dict__.pop(name, None)
    module.__class__ = module.derivation[1]
    return True


def derived_class(bases: tuple[type, ...], class_of: Callable[[Any], Any], base: type, **names: Any) -> Any:
    """Create the class that `class_of(base)` returns."""
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, bases, {**names, "derivation": (class_of, base)})


class ConvertedModule(DerivedModule):
    """Base of every class that `convert_class` derives.

    fqn: the module's name in the model that was converted.
    checked: the values of `training` for which the forward pass was checked.
    """

    attributes = "fqn", "checked"
    fqn = ""
    checked: frozenset[bool] = frozenset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `module.bfloat16()`, `.to(..)` and the like by setting the data of each weight.

        PyTorch would swap such a Parameter (`torch.utils.swap_tensors`), which fails if a graph refers to it. It still
        does so to and from the meta device, where the data cannot be set.
        """
        table = _compat.parameters_of(self)
        weights: dict[str, Any] = {
            name: p for name, p in table.items() if isinstance(p, (MasterWeightTensor, QuantizedTensor))
        }
        with torch.no_grad():
            moved = {name: fn(weight) for name, weight in weights.items() if not weight.is_meta}
        moved = {name: new for name, new in moved.items() if not new.is_meta}
        for name in moved:
            # PyTorch skips Parameters that are None.
            table[name] = None
        try:
            super()._apply(fn, recurse)
        finally:
            table.update((name, weights[name]) for name in moved)
        for name, new in moved.items():
            _set_data(weights[name], new, fn)
        return self


def _set_data(weight: nn.Parameter, new: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set the data of `weight` to that of `new`, and the data of its gradient to `fn(gradient)`."""
    grad, weight.grad = weight.grad, None
    if new is not weight:
        with _compat.no_torch_function():
            weight.data = new
        vars(weight).update(vars(new))
    if grad is not None:
        with torch.no_grad():
            grad.data = fn(grad)
    weight.grad = grad


class ConvertedLinear(ConvertedModule, nn.Linear):
    """Base of derived classes of linear layers, with their forward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if isinstance(weight, WEIGHTS):
            # Set by a fused parent module; see fused_modules.py.
            shared = getattr(input, "shared_input", None)
            if shared is None:
                return local_linear(input, weight, self.bias, weight)
            # Pass the input itself, not the view that carries the copies, so that gradients are summed in order.
            return local_linear(shared.x, weight, self.bias, weight, shared=shared)
        if is_low_precision(weight):
            return linear(input, weight, self.bias)
        torch_fsdp.check_not_flattened(weight, self.fqn or "a converted layer")
        _check_replaced(self)
        return super().forward(input)

    def extra_repr(self) -> str:
        weight: Any = self.weight
        if not is_low_precision(weight):
            return super().extra_repr()
        return f"{super().extra_repr()}, weight in {config_of(_compat.local_of(weight)).weight_format.name}"


def _check_replaced(module: ConvertedModule) -> None:
    """Warn that `module` computes with a plain weight.

    Raises NotImplementedError if accelerate offloads it, or if a transform of `torch.func` wraps it.
    """
    refuse_transforms()
    if hugging_face.is_offloaded_by_accelerate(module):
        raise NotImplementedError(
            f"{module.fqn or 'a converted layer'}: accelerate replaced its offloaded weight with a plain one; to "
            "offload converted weights to the CPU, pass state_dict=dict(model.named_parameters()) to cpu_offload or "
            "dispatch_model; to offload to the disk, call unconvert(model) first"
        )
    _warn_replaced(module.fqn)


@torch.compiler.assume_constant_result
def _warn_replaced(fqn: str) -> None:
    """Warn that a layer computes with a plain weight; a compiled layer warns when it is traced.

    Python shows the warning once for each layer, because the text begins with its name.
    """
    warnings.warn(
        f"{fqn or 'a converted layer'} was converted to low precision, but computes in high precision, because its "
        "weight was replaced with a plain tensor (for example by functional_call, a parametrization, a dispatcher "
        "or an assignment); convert the model last, or assign a converted Parameter",
        stacklevel=2,
    )


# Forward passes that need no check, because they only run a low-precision GEMM with each weight.
KNOWN_FORWARDS: set[Callable[..., Any]] = {nn.Linear.forward, ConvertedLinear.forward}


def convert_class(module: nn.Module, fqn: str = "") -> None:
    """Make a linear layer call `linear`, and make a module with another forward pass check that pass.

    The module gets a subclass of its class with the same name. A module in `KNOWN_FORWARDS` that needs neither keeps
    its class.
    """
    # The weight of a module that was converted before may be a new one.
    module.__dict__.pop("checked", None)
    forward: Any = type(module).forward
    if not isinstance(module, ConvertedModule) and (forward is nn.Linear.forward or forward not in KNOWN_FORWARDS):
        own: Any = type(module)
        module.__class__ = _class_of(own)
        module.fqn = fqn  # type: ignore[assignment]


def why_no_class(module: nn.Module) -> str | None:
    """Return why `convert_class` cannot derive a class from that of `module`, or None if it can."""
    try:
        if not isinstance(module, ConvertedModule):
            _class_of(type(module))  # type: ignore[arg-type]  # classes are hashable
    except TypeError as error:
        return f"no class can be derived from {type(module).__name__} ({error}); exclude it"
    return None


@functools.cache
def _class_of(base: Any) -> Any:
    if base.forward is nn.Linear.forward or hugging_face.multiplies_as_linear(base):
        return derived_class((ConvertedLinear, base), _class_of, base)
    # Place it after a linear layer's own class, so that its `super().forward` is the converted one.
    bases = (base, ConvertedLinear) if issubclass(base, nn.Linear) else (ConvertedModule, base)
    return derived_class(bases, _class_of, base, forward=_checked_forward(base))


def _checked_forward(base: Any) -> Callable[..., Any]:
    """Return the forward pass of `base`, checked in its first call in training and in evaluation."""

    # Keep the signature, which frameworks read.
    @functools.wraps(base.forward)
    def forward(self: ConvertedModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            before = traced_gemms()
            out = base.forward(self, *args, **kwargs)
            if traced_gemms() == before and not _has_empty(args, kwargs):
                # `torch.compile` of PyTorch 2.11 can trace only Parameters and, for the error, constants.
                own = _compat.parameters_of(self).items()
                names = [name for name, p in own if p is not None and is_low_precision(p)]
                if names:
                    _refuse(self.fqn, base.__name__, ", ".join(names), self.training)
            return out
        weights = _weights_of(self)
        if not weights:
            _check_replaced(self)
        if self.training in self.checked:
            return base.forward(self, *args, **kwargs)
        for name, weight in weights.items():
            # Copies and pickles do not have this attribute.
            weight.layer = weight.layer or f"{self.fqn}.{name}".lstrip(".")
        with recorded_uses() as uses:
            out = base.forward(self, *args, **kwargs)
        keys = {name: key_of(weight) for name, weight in weights.items()}
        missing = [name for name, key in keys.items() if uses.multiplied.isdisjoint((key, None))]
        if not missing and weights:
            self.checked |= {self.training}
        elif missing:
            # A call without tokens may skip its GEMMs, and the experts of a rank may have no tokens.
            if not isinstance(self, nn.Linear) or _has_empty(args, kwargs):
                missing = [name for name in missing if keys[name] in uses.read]
            if missing:
                _refuse(self.fqn, base.__name__, ", ".join(missing), self.training)
        return out

    return forward


def _weights_of(module: ConvertedModule) -> dict[str, Any]:
    """Return the converted weights that `module` directly holds; for shards, the local part.

    Raises NotImplementedError if FSDP1 has replaced all of them with plain tensors.
    """
    # Replicas of `nn.DataParallel` have tensors instead of Parameters.
    tensors = {name: x for name, x in vars(module).items() if isinstance(x, torch.Tensor)}
    own = {name: _compat.local_of(p) for name, p in (tensors | _compat.parameters_of(module)).items() if p is not None}
    weights = {name: weight for name, weight in own.items() if is_low_precision(weight)}
    for name, x in tensors.items() if not weights else ():
        torch_fsdp.check_not_flattened(x, f"{module.fqn}.{name}".lstrip("."))
    return weights


def _has_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an activation has no tokens, so that a forward pass may skip its GEMMs."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return any(x.is_floating_point() and x.numel() == 0 for x in given)


@torch.compiler.assume_constant_result
def _refuse(fqn: str, kind: str, names: str, training: bool) -> None:
    raise NotImplementedError(
        f"{fqn or 'the model itself'}: {kind}.forward ran no low-precision GEMM with "
        f"its converted {names} in {'training' if training else 'evaluation'}, so it uses the "
        "high-precision values; call torch.nn.functional.linear(x, weight) (grouped_mm for experts), or exclude "
        f"the module (filter_fn=skip_fqns({fqn!r}))"
    )


def _rebuild(base: type, class_of: Callable[[Any], Any] = _class_of) -> nn.Module:
    cls = class_of(base)
    return cls.__new__(cls)
