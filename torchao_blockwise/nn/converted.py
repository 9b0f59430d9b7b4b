"""The class of a converted `nn.Linear`: the layer itself, calling `linear` by name.

A tensor subclass is asked about `F.linear` only as long as it is the outermost one. Tensor parallelism puts a DTensor
around it, which would take the product apart; so the layer does not rely on being asked.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.nn.linear_layer import linear
from torchao_blockwise.nn.moved_modules import move_whole
from torchao_blockwise.nn.sharded_linear import why_shards_cut_blocks
from torchao_blockwise.nn.shared_input import SharedInput
from torchao_blockwise.nn.weights import config_of, is_low_precision
from torchao_blockwise.tensors.unchanged import check_unchanged


class ConvertedLinear(nn.Linear):
    """What `convert_class` adds to a linear layer: its forward pass, and a look at its shards when it is parallelized.

    fqn: the layer's name in the model that was converted. converted_from: the class it had.
    shared_input: what it shares with other layers that read the same activation; see fused_modules.py.
    """

    fqn = ""
    shared_input: SharedInput | None = None
    converted_from: type = nn.Linear
    said_replaced = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            check_unchanged(self)
        weight: Any = self.weight
        if is_low_precision(weight):
            shared = self.shared_input
            return (linear if shared is None else shared.linear)(input, weight, self.bias)
        torch_fsdp.check_not_flattened(weight, self.fqn or "a converted layer")
        if torch.compiler.is_compiling():
            _warn_replaced(self.fqn)
        elif not (self.said_replaced or _meant):
            self.said_replaced = True
            _warn_replaced(self.fqn)
        return super().forward(input)

    def extra_repr(self) -> str:
        weight: Any = self.weight
        if not is_low_precision(weight):
            return super().extra_repr()
        return f"{super().extra_repr()}, weight in {config_of(_compat.local_of(weight)).weight_format.name}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        # A class that another wrapper derived from this one is its own affair.
        if type(self) is not _class_of(self.converted_from):
            return reduced
        return _rebuild, (self.converted_from,), *reduced[2:]

    def _mark_distributed(self, value: Any) -> None:
        """`distribute_module` has put its DTensors in place: the moment to refuse shards that cut blocks."""
        if is_low_precision(self.weight):
            reason = why_shards_cut_blocks(self.weight)
            if reason is not None:
                raise ValueError(f"{self.fqn or 'linear'}: {reason}")
        self.__dict__[_compat.DISTRIBUTED_MARK] = value


setattr(
    ConvertedLinear,
    _compat.DISTRIBUTED_MARK,
    property(
        lambda module: module.__dict__.get(_compat.DISTRIBUTED_MARK, False),
        ConvertedLinear._mark_distributed,
    ),
)


_meant = False


@contextlib.contextmanager
def high_precision_meant() -> Iterator[None]:
    """A context in which plain tensors take the places of converted weights on purpose, and nothing warns of it."""
    global _meant
    before, _meant = _meant, True
    try:
        yield
    finally:
        _meant = before


@torch.compiler.assume_constant_result
def _warn_replaced(fqn: str) -> None:
    """Say that a layer computes with a plain weight; in a compiled one while it is traced."""
    warnings.warn(
        f"{fqn or 'a converted layer'} was converted to low precision, but its weight was replaced by a plain tensor "
        "(by functional_call, pruning, a dispatcher or an assignment, say): it computes in high precision; convert "
        "last, or put a converted Parameter there",
        stacklevel=2,
    )


def convert_class(module: nn.Linear, fqn: str = "") -> None:
    """Make the forward pass of `module` call `linear`; it stays an instance of its class, under the same name.

    A layer with a forward pass of its own is left alone.
    """
    if not isinstance(module, ConvertedLinear) and type(module).forward is nn.Linear.forward:
        own: Any = type(module)
        module.__class__ = _class_of(own)
        module.fqn = fqn  # type: ignore[assignment]


def restore_class(module: ConvertedLinear) -> None:
    """Give `module` the class back that it had before `convert_class`; one that others derived is left alone."""
    if type(module) is _class_of(module.converted_from):
        module.__dict__.pop("fqn", None)
        module.__class__ = module.converted_from


@functools.cache
def _class_of(base: Any) -> Any:
    # Under the same name in the same module: tracers take what lies in torch.nn for one operation.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (ConvertedLinear, base), {**names, "converted_from": base})


def _rebuild(base: type) -> nn.Linear:
    # A converted layer of another process: it may be sharded here.
    torch_fsdp.install()
    move_whole()
    cls = _class_of(base)
    return cls.__new__(cls)
