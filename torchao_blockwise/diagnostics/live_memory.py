"""Count the bytes of live tensors while code runs, on any device and for fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchao_blockwise import _compat
from torchao_blockwise._compat import Args, Kwargs, Operation, Types
from torchao_blockwise._compat.modes import TorchDispatchMode, is_traceable_wrapper_subclass, storage_of
from torchao_blockwise.nn import gemms
from torchao_blockwise.ops.registry import NAMESPACE

_OURS = f"{NAMESPACE}::"
# Operations that make copies of a weight inside a GEMM with it.
_OF_WEIGHTS = {"quantize", "global_scale", "transpose"}


class LiveMemory(TorchDispatchMode):
    """A dispatch mode that records the peak memory of new tensors.

    peak: the largest number of bytes alive after an operation. copies: the largest number of bytes of quantized copies
    of weights alive at once.
    Of composite operations it decomposes only GEMMs with weights, which make quantized copies. Bytes are those of
    storages, each counted once, from the operation that allocates it until it is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.copies = 0
        # {storage: (weak reference, bytes, whether it is a copy of a weight)}
        self._made: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        # Bytes of all storages in `_made`, some of which may be freed by now.
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
        # Freed storages are only looked up if the peak may have risen.
        if self._bytes_made > self.peak or name in _OF_WEIGHTS:
            self.peak = max(self.peak, self.live())
        if is_copy:
            self.copies = max(self.copies, sum(nbytes for _, nbytes, is_copy in self._made.values() if is_copy))
        return out

    def live(self) -> int:
        """Return the bytes that are alive now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self._bytes_made = sum(nbytes for _, nbytes, _ in self._made.values())
        return self._bytes_made


def plain_tensors(x: Any) -> list[torch.Tensor]:
    """Return the plain tensors in `x`; for a subclass its inner tensors."""
    if isinstance(x, torch.Tensor):
        if is_traceable_wrapper_subclass(x):
            return [y for name in x.__tensor_flatten__()[0] for y in plain_tensors(getattr(x, name))]
        return [x]
    return [y for item in x for y in plain_tensors(item)] if isinstance(x, (list, tuple)) else []


_PRODUCTS = {op.overload: op for op in (gemms.master_matmul_op, gemms.quantized_matmul_op)}
