"""Types of PyTorch objects that are private or missing in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

# An operator overload, the first argument of `__torch_dispatch__`.
Operation: TypeAlias = "torch._ops.OpOverload[..., Any]"
# The other arguments of `__torch_function__` and `__torch_dispatch__`.
Function: TypeAlias = Callable[..., Any]
Types: TypeAlias = Sequence[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
