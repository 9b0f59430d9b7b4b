"""Modes that see every operation, which PyTorch lets be left by private names alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils import _python_dispatch


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees operations.

    Selective checkpointing is one: it counts operations, and would take those of an observer for the layer's.
    """
    return _python_dispatch._disable_current_modes()
