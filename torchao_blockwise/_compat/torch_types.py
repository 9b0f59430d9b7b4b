"""Types of PyTorch objects that are private, incomplete or missing in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch._C import _distributed_c10d

    class Store(_distributed_c10d.Store):
        """A key-value store with the attributes that PyTorch's stubs lack."""

        timeout: timedelta

        def clone(self) -> Store: ...
        def multi_get(self, keys: list[str]) -> list[bytes]: ...


# An operator overload, the first argument of `__torch_dispatch__`.
Operation: TypeAlias = "torch._ops.OpOverload[..., Any]"
# The other arguments of `__torch_function__` and `__torch_dispatch__`.
Function: TypeAlias = Callable[..., Any]
Types: TypeAlias = Sequence[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
