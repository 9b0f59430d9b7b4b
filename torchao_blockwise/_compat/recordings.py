"""What recordings of operations (ops/replay.py) take from PyTorch without its promise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["TorchDispatchMode", "empty_strided_on", "is_traceable_wrapper_subclass", "no_autocast", "storage_of"]

# A context in which autocast casts nothing, on any device.
no_autocast = torch._C._DisableAutocast


def storage_of(x: torch.Tensor) -> int:
    """What tells storages apart that are alive."""
    return x.untyped_storage()._cdata


def empty_strided_on(
    device: torch.device,
) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """(size, strides, dtype) -> an uninitialized tensor on `device`, which is the current one.

    By the allocation of code that Inductor generates, where PyTorch has it: a third of the time.
    """
    allocate: Callable[..., torch.Tensor] | None = getattr(
        torch._C._dynamo.guards, f"_empty_strided_{device.type}", None
    )
    if allocate is not None:
        return allocate
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)
