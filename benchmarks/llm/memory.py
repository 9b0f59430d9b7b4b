"""Bytes: what one step keeps for backward, and weights as products read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect {storage address: bytes} of what autograd saves for backward inside the block, parameters left out."""
    held: dict[int, int] = {}
    keep = []  # A storage that is freed and allocated again would be counted once.
    own = {s.data_ptr() for t in (*model.parameters(), *model.buffers()) for s in _storages(t)}

    def pack(t: torch.Tensor) -> torch.Tensor:
        for storage in _storages(t.detach()):
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
                keep.append(storage)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield held


def _storages(t: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """The storages of a tensor, or of the plain tensors inside a wrapper subclass."""
    if is_traceable_wrapper_subclass(t):
        for name in t.__tensor_flatten__()[0]:
            yield from _storages(getattr(t, name))
    else:
        yield t.untyped_storage()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the linear weights and the experts' as the GEMMs read them.

    2 an element for the copy that bf16 autocast makes; the quantized operand, scales included, where converted.
    """
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights += [p for p in model.parameters() if p.dim() == 3]
    return sum(_operand_bytes(w) for w in weights)


def _operand_bytes(weight: torch.Tensor) -> int:
    config = getattr(weight, "config", None)
    if config is None:
        return 2 * weight.numel()
    return config.weight_format.nbytes(*weight.shape, scale_per_matrix=config.scale_per_expert)
