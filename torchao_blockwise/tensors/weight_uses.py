"""Records of how a forward pass uses weights, for the check of forward passes in nn/converted.py.

Either a low-precision GEMM uses a weight, or its high-precision values are read. Records are per thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class WeightUses(NamedTuple):
    """The keys of the weights that a forward pass multiplied in a GEMM, and of those whose values it read otherwise.

    The key None stands for any weight, in a compiled graph.
    """

    multiplied: set[int | None]
    read: set[int]


class _Records(threading.local):
    """stack: the forward passes of this thread that are being checked. gemms: the number of GEMMs traced or run."""

    def __init__(self) -> None:
        self.stack: list[WeightUses] = []
        self.gemms = 0


_records = _Records()


@contextlib.contextmanager
def recorded_uses() -> Iterator[WeightUses]:
    """Record the uses of weights inside the context."""
    uses = WeightUses(set(), set())
    _records.stack.append(uses)
    try:
        yield uses
    finally:
        _records.stack.pop()


def note_gemm(weight: Any) -> None:
    """Record a low-precision GEMM with `weight`; None in a compiled graph, which does not know its weights."""
    _records.gemms += 1
    for uses in _records.stack:
        uses.multiplied.add(None if weight is None else key_of(weight))


def note_read(weight: Any) -> None:
    """Record that the values of `weight` are read, other than for quantization."""
    for uses in _records.stack:
        uses.read.add(key_of(weight))


@torch.compiler.assume_constant_result
def traced_gemms() -> int:
    """Return the number of low-precision GEMMs that were traced or run in this thread."""
    return _records.gemms


@torch.compiler.assume_constant_result
def note_traced_gemm() -> None:
    note_gemm(None)


def key_of(weight: Any) -> int:
    """Return a number that a weight shares with its views and casts, and with no other weight that is alive.

    It is the id of the layer's name, because they share the same string object. (Two layers may have equal names.)
    """
    return id(getattr(weight, "layer", "") or weight)
