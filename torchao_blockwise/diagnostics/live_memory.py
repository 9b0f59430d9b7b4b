"""Bytes of tensors that are alive while something runs, counted, on any device and for fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchao_blockwise import _compat
from torchao_blockwise._compat.modes import TorchDispatchMode, is_traceable_wrapper_subclass, storage_of
from torchao_blockwise._compat.torch_types import Args, Kwargs, Operation, Types
from torchao_blockwise.nn import gemms
from torchao_blockwise.ops.registry import NAMESPACE

_OURS = f"{NAMESPACE}::"
# What makes copies of weights inside of a product with one.
_OF_WEIGHTS = {"quantize", "global_scale", "transpose"}


class LiveMemory(TorchDispatchMode):
    """Under it `peak` is the most bytes of new tensors that are alive after an operation.

    copies: the most bytes of quantized copies of weights that live at once.
    It looks into products with weights, whose quantized copy no other sees, and into no other operation. Bytes are
    those of storages, each counted once, from the operation that makes it until nothing holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.copies = 0
        # By storage: (whether it lives, its bytes, whether it is a copy of a weight).
        self._made: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        # Of all that were made, and may be gone.
        self._bytes_made = 0
        self._inside = 0

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        name = _compat.schema_of(func).name.removeprefix(_OURS)
        if func in _PRODUCTS:
            with self:
                self._inside += 1
                try:
                    return _PRODUCTS[func].dispatched(*args)
                finally:
                    self._inside -= 1
        before = {storage_of(x) for x in plain_tensors(args)}
        out = func(*args, **(kwargs or {}))
        is_copy = name == "transpose" or (self._inside > 0 and name in _OF_WEIGHTS)
        for x in plain_tensors(out):
            storage = x.untyped_storage()
            if storage_of(x) not in before:
                self._made[storage_of(x)] = StorageWeakRef(storage), storage.nbytes(), is_copy
                self._bytes_made += storage.nbytes()
            del storage
        # What is gone is looked for only where the peak may be higher.
        if self._bytes_made > self.peak or name in _OF_WEIGHTS:
            self.peak = max(self.peak, self.live())
        if is_copy:
            self.copies = max(self.copies, sum(nbytes for _, nbytes, is_copy in self._made.values() if is_copy))
        return out

    def live(self) -> int:
        """Bytes that live now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self._bytes_made = sum(nbytes for _, nbytes, _ in self._made.values())
        return self._bytes_made


def plain_tensors(x: Any) -> list[torch.Tensor]:
    """The plain tensors in `x`, of subclasses those that they are made of."""
    if isinstance(x, torch.Tensor):
        if is_traceable_wrapper_subclass(x):
            return [y for name in x.__tensor_flatten__()[0] for y in plain_tensors(getattr(x, name))]
        return [x]
    return [y for item in x for y in plain_tensors(item)] if isinstance(x, (list, tuple)) else []


_PRODUCTS = {op.overload: op for op in (gemms.master_matmul_op, gemms.quantized_matmul_op)}
