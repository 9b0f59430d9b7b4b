"""What lives while a layer runs: bytes of tensors after each operation, on any device, without an allocator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise.formats import Groups, Operand, get_format
from torchao_blockwise.nn import weight_products
from torchao_blockwise.ops import get_backend

_MASTER_MATMUL = torch.ops.torchao_blockwise.master_matmul.default


class Step(NamedTuple):
    """An operation, and what lives when it is done: its operands still, its results already.

    name: without a namespace for operations of ours, "aten::add" for others.
    """

    name: str
    nbytes: int
    parts: tuple[str, ...]


class LiveMemory(TorchDispatchMode):
    """Under it `steps` get what lives after each operation, of what was made under it.

    It looks into products with master weights, whose quantized copy no other sees, and into no other operation.
    """

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("torchao_blockwise::")
        if func is _MASTER_MATMUL:
            with self:
                return _master_matmul(*args)
        before = {x.untyped_storage()._cdata for x in _plain(args)}
        out = func(*args, **(kwargs or {}))
        for x in _plain(out):
            storage = x.untyped_storage()
            if storage._cdata not in before:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), f"{name} {list(x.shape)}"
            del storage
        self.note(name)
        return out

    def note(self, name: str) -> None:
        """Add a step of that name now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        live = self._made.values()
        self.steps.append(Step(name, sum(made[1] for made in live), tuple(made[2] for made in live)))

    @property
    def peak(self) -> Step:
        return max(self.steps, key=lambda step: step.nbytes)


def _master_matmul(qdata, scale, global_scale, format_name, hp, fmt, *rest) -> torch.Tensor:
    """The operation's implementation, of what a mode sees of its arguments."""
    *recipe, bias, ends, tables, backend = rest
    a, groups = Operand(qdata, scale, global_scale, format_name), None if ends is None else Groups(ends, tables)
    return weight_products.master_matmul(a, hp, get_format(fmt), *recipe, bias, groups, get_backend(backend))


def _plain(x) -> list[torch.Tensor]:
    """The plain tensors in `x`, of subclasses those that they are made of."""
    if isinstance(x, torch.Tensor):
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            return [x]
        return [y for name in x.__tensor_flatten__()[0] for y in _plain(getattr(x, name))]
    return [y for item in x for y in _plain(item)] if isinstance(x, (list, tuple)) else []
