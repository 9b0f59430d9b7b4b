"""Who sees every operation: modes, which PyTorch lets be left by private names alone, and profilers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees operations.

    Selective checkpointing is one: it counts operations, and would take those of an observer for the layer's.
    """
    return _python_dispatch._disable_current_modes()


def is_profiling() -> bool:
    """Whether one of PyTorch's profilers runs."""
    return torch.autograd.profiler._is_profiler_enabled
