"""The class of a converted module, derived from its own.

An `nn.Linear` calls `linear` by name. A tensor subclass is asked about `F.linear` only as long as it is the outermost
one; tensor parallelism puts a DTensor around it, which would decompose `F.linear`.

A module with another forward pass keeps it. Its first call in training and its first in evaluation check that a
low-precision GEMM with each converted weight ran inside: a row lookup or a kernel of the user would read the
high-precision values. Experts may have no tokens: of these only weights that were read must have run one. A compiled
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
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.nn.layer import linear, local_linear
from torchao_blockwise.nn.weights import WEIGHTS, config_of, is_low_precision
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_uses import recorded_uses, traced_gemms


class DerivedModule(nn.Module):
    """Base of modules whose class was derived from their own, under the same name: tracers take what lies in torch.nn
    for one operation.

    derivation: (what derives the class, the class that the module had); each derived class has one.
    attributes: what a module of it has besides.
    """

    derivation: tuple[Callable[[Any], Any], type]
    attributes: tuple[str, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        derivation = vars(type(self)).get("derivation")
        # A class that another wrapper derived from this one is its own affair.
        return reduced if derivation is None else (_rebuild, derivation[::-1], *reduced[2:])


def restore_class(module: DerivedModule) -> bool:
    """Give `module` the class back that it had, unless another wrapper derived the one that it has; return whether."""
    if "derivation" not in vars(type(module)):
        return False
    for name in module.attributes:
        module.__dict__.pop(name, None)
    module.__class__ = module.derivation[1]
    return True


def derived_class(bases: tuple[type, ...], class_of: Callable[[Any], Any], base: type, **names: Any) -> Any:
    """The class that `class_of(base)` derives."""
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, bases, {**names, "derivation": (class_of, base)})


class ConvertedModule(DerivedModule):
    """Base of every class that `convert_class` makes.

    fqn: its name in the model that was converted.
    checked: in which of `training` its forward pass was seen to run a low-precision GEMM with each weight.
    """

    attributes = "fqn", "checked"
    fqn = ""
    checked: frozenset[bool] = frozenset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """`module.bfloat16()`, `.to(..)` and the like: each weight stays the object that it is and takes other data.

        PyTorch swaps such a Parameter for another (`torch.utils.swap_tensors`), and refuses where a graph holds it. It
        does so here to and from the meta device, which data cannot change.
        """
        table = _compat.parameters_of(self)
        weights: dict[str, Any] = {
            name: p for name, p in table.items() if isinstance(p, (MasterWeightTensor, QuantizedTensor))
        }
        with torch.no_grad():
            moved = {name: fn(weight) for name, weight in weights.items() if not weight.is_meta}
        moved = {name: new for name, new in moved.items() if not new.is_meta}
        for name in moved:
            # PyTorch passes over what is None.
            table[name] = None
        try:
            super()._apply(fn, recurse)
        finally:
            table.update((name, weights[name]) for name in moved)
        for name, new in moved.items():
            _set_data(weights[name], new, fn)
        return self


def _set_data(weight: nn.Parameter, new: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give `weight` the data of `new`, and its gradient that of `fn(gradient)`."""
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
    """Base of those of linear layers: the forward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if isinstance(weight, WEIGHTS):
            # Of a module around this one; see fused_modules.py.
            shared = getattr(input, "shared_input", None)
            if shared is None:
                return local_linear(input, weight, self.bias, weight)
            # The input itself, not the view that carries the copies: so gradients of all readers are summed in order.
            return local_linear(shared.x, weight, self.bias, weight, shared=shared)
        if is_low_precision(weight):
            return linear(input, weight, self.bias)
        torch_fsdp.check_not_flattened(weight, self.fqn or "a converted layer")
        _warn_replaced(self.fqn)
        return super().forward(input)

    def extra_repr(self) -> str:
        weight: Any = self.weight
        if not is_low_precision(weight):
            return super().extra_repr()
        return f"{super().extra_repr()}, weight in {config_of(_compat.local_of(weight)).weight_format.name}"


@torch.compiler.assume_constant_result
def _warn_replaced(fqn: str) -> None:
    """Say that a layer computes with a plain weight; in a compiled one while it is traced.

    Python shows a warning once for each layer, as the text begins with its name.
    """
    warnings.warn(
        f"{fqn or 'a converted layer'} was converted to low precision, but its weight was replaced by a plain tensor "
        "(by functional_call, pruning, a dispatcher or an assignment, say): it computes in high precision; convert "
        "last, or put a converted Parameter there",
        stacklevel=2,
    )


# Forward passes that run a low-precision GEMM with each weight and read it in no other way: they need no check.
KNOWN_FORWARDS: set[Callable[..., Any]] = {nn.Linear.forward, ConvertedLinear.forward}


def convert_class(module: nn.Module, fqn: str = "") -> None:
    """Make a linear layer call `linear`, and a module with another forward pass check that pass.

    It stays an instance of its class, under the same name. One whose forward pass is known to need neither keeps its
    class.
    """
    # Of a module that was converted before, it knows nothing of the weight that comes now.
    module.__dict__.pop("checked", None)
    forward: Any = type(module).forward
    if not isinstance(module, ConvertedModule) and (forward is nn.Linear.forward or forward not in KNOWN_FORWARDS):
        own: Any = type(module)
        module.__class__ = _class_of(own)
        module.fqn = fqn  # type: ignore[assignment]


def why_no_class(module: nn.Module) -> str | None:
    """Why `convert_class` cannot derive a class from that of `module`, or None."""
    try:
        if not isinstance(module, ConvertedModule):
            _class_of(type(module))  # type: ignore[arg-type]  # classes are hashable
    except TypeError as error:
        return f"no class can be derived from {type(module).__name__} ({error}); exclude it"
    return None


@functools.cache
def _class_of(base: Any) -> Any:
    if base.forward is nn.Linear.forward:
        return derived_class((ConvertedLinear, base), _class_of, base)
    # Behind a linear layer's own class, so that its `super().forward` is the converted one.
    bases = (base, ConvertedLinear) if issubclass(base, nn.Linear) else (ConvertedModule, base)
    return derived_class(bases, _class_of, base, forward=_checked_forward(base))


def _checked_forward(base: Any) -> Callable[..., Any]:
    """The forward pass of `base`, checked in its first call in training and in evaluation."""

    # Under its signature, which frameworks read.
    @functools.wraps(base.forward)
    def forward(self: ConvertedModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            before = traced_gemms()
            out = base.forward(self, *args, **kwargs)
            if traced_gemms() == before and not _has_empty(args, kwargs):
                # What compilers of PyTorch 2.11 can trace: Parameters, and constants for the error.
                own = _compat.parameters_of(self).items()
                names = [name for name, p in own if p is not None and is_low_precision(p)]
                if names:
                    _refuse(self.fqn, base.__name__, ", ".join(names), self.training)
            return out
        weights = _weights_of(self)
        if not weights:
            _warn_replaced(self.fqn)
        if self.training in self.checked:
            return base.forward(self, *args, **kwargs)
        for name, weight in weights.items():
            # Copies and pickles do not carry it.
            weight.layer = weight.layer or f"{self.fqn}.{name}".lstrip(".")
        with recorded_uses() as uses:
            out = base.forward(self, *args, **kwargs)
        missing = [name for name, weight in weights.items() if not uses.has_gemm_with(weight)]
        if not missing and weights:
            self.checked |= {self.training}
        elif missing:
            # A call without tokens may skip its GEMMs, and experts of one rank may have none.
            if not isinstance(self, nn.Linear) or _has_empty(args, kwargs):
                missing = [name for name in missing if uses.has_read_of(weights[name])]
            if missing:
                _refuse(self.fqn, base.__name__, ", ".join(missing), self.training)
        return out

    return forward


def _weights_of(module: ConvertedModule) -> dict[str, Any]:
    """The converted weights that `module` itself holds, of shards this rank's part.

    Raises NotImplementedError where FSDP1 has put plain tensors in the place of all of them.
    """
    # Replicas of `nn.DataParallel` have tensors in the places of Parameters.
    tensors = {name: x for name, x in vars(module).items() if isinstance(x, torch.Tensor)}
    own = {name: _compat.local_of(p) for name, p in (tensors | _compat.parameters_of(module)).items() if p is not None}
    weights = {name: weight for name, weight in own.items() if is_low_precision(weight)}
    for name, x in tensors.items() if not weights else ():
        torch_fsdp.check_not_flattened(x, f"{module.fqn}.{name}".lstrip("."))
    return weights


def _has_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an activation has no tokens: a forward pass may skip its GEMMs then."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return any(x.is_floating_point() and x.numel() == 0 for x in given)


@torch.compiler.assume_constant_result
def _refuse(fqn: str, kind: str, names: str, training: bool) -> None:
    raise NotImplementedError(
        f"{fqn or 'the model itself'}: {kind}.forward ran no low-precision GEMM with "
        f"its converted {names} in {'training' if training else 'evaluation'}, so that it uses the "
        "high-precision values; multiply by torch.nn.functional.linear(x, weight) (grouped_mm for experts), or leave "
        f"the module out (filter_fn=skip_fqns({fqn!r}))"
    )


def _rebuild(base: type, class_of: Callable[[Any], Any] = _class_of) -> nn.Module:
    cls = class_of(base)
    return cls.__new__(cls)
