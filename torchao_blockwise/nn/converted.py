"""The class of a converted `nn.Linear`: the layer itself, calling `linear` by name.

A tensor subclass is asked about `F.linear` only as long as it is the outermost one. Tensor parallelism puts a DTensor
around it, which would take the product apart; so the layer does not rely on being asked.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.nn.linear import is_low_precision, linear
from torchao_blockwise.nn.moved_modules import move_whole
from torchao_blockwise.nn.sharded_linear import why_shards_cut_blocks


class ConvertedLinear(nn.Linear):
    """What `convert_class` adds to a linear layer: its forward pass, and a look at its shards when it is parallelised.

    fqn: the layer's name in the model that was converted. converted_from: the class it had.
    """

    fqn = ""
    converted_from: type = nn.Linear

    def forward(self, input):
        weight = self.weight
        # `torch.func.functional_call` and gathers by others may put a plain weight in its place.
        return linear(input, weight, self.bias) if is_low_precision(weight) else super().forward(input)

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        # A class that another wrapper derived from this one is its own affair.
        if type(self) is not _class_of(self.converted_from):
            return reduced
        return _rebuild, (self.converted_from,), *reduced[2:]

    def _mark_distributed(self, value) -> None:
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


def convert_class(module: nn.Linear, fqn: str = "") -> None:
    """Make the forward pass of `module` call `linear`; it stays an instance of its class, under the same name.

    A layer with a forward pass of its own is left alone.
    """
    if not isinstance(module, ConvertedLinear) and type(module).forward is nn.Linear.forward:
        own: Any = type(module)
        module.__class__ = _class_of(own)
        module.fqn = fqn


@functools.cache
def _class_of(base: Any) -> Any:
    # Under the same name in the same module: tracers take what lies in torch.nn for one operation.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (ConvertedLinear, base), {**names, "converted_from": base})


def _rebuild(base: type) -> nn.Linear:
    move_whole()
    cls = _class_of(base)
    return cls.__new__(cls)
