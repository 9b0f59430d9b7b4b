"""Types of what PyTorch hands to this package, which PyTorch itself names privately, in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch._C import _distributed_c10d

    class Store(_distributed_c10d.Store):
        """A key-value store, with what PyTorch's stubs leave out."""

        timeout: timedelta

        def clone(self) -> Store: ...


# One overload of an operation, as tensor subclasses are asked about it.
Operation: TypeAlias = "torch._ops.OpOverload[..., Any]"
# What `__torch_function__` and `__torch_dispatch__` are given beside it: PyTorch says no more of them.
Function: TypeAlias = Callable[..., Any]
Types: TypeAlias = Sequence[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
