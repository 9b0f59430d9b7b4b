"""Modes that see every operation, and what they need to know of tensors; profilers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "TorchDispatchMode",
    "dispatch_modes",
    "is_profiling",
    "is_traceable_wrapper_subclass",
    "storage_of",
    "without_modes",
]


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees operations.

    Selective checkpointing is one: it counts operations, and would take those of an observer for the layer's.
    """
    return _python_dispatch._disable_current_modes()


def storage_of(x: torch.Tensor) -> int:
    """A number that tells storages apart that are alive."""
    return x.untyped_storage()._cdata


# Whether one of PyTorch's profilers runs.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# The number of dispatch modes that see every operation: selective checkpointing, a counter of FLOPs, fake tensors.
dispatch_modes = torch._C._len_torch_dispatch_stack
