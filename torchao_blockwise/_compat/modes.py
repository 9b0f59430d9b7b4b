"""Modes that see every operation, and what they need to know of tensors; profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "TorchDispatchMode",
    "is_intercepted",
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
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_has_transforms = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_intercepted(values: Iterable[Any]) -> bool:
    """Whether something is to see an operation on `values`: a compiler, a mode (selective checkpointing, a counter of
    FLOPs, fake tensors), a profiler, a transform of `torch.func`, or a tensor that is a subclass or has no memory.

    values: tensors, tuples and lists that begin with one, and others.
    """
    # First what compilers know; they cannot ask the others.
    if torch.compiler.is_compiling() or _dispatch_modes() or _function_modes() or is_profiling():
        return True
    if _has_transforms() or _is_tracing():
        return True
    for value in values:
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or value.is_meta):
            return True
    return False
