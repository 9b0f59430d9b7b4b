"""Which weights' high-precision values are read: for the check of a module's forward pass (nn/converted.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Records(threading.local):
    def __init__(self) -> None:
        self.of_thread: list[set[int]] = []


_records = _Records()


def key_of(weight: Any) -> int:
    """A number that a weight shares with its views and casts, and with no other weight that is alive.

    They carry the name of one layer, the very same string; two layers may have equal names.
    """
    return id(getattr(weight, "layer", "") or weight)


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[int]]:
    """The keys of weights whose values this thread reads inside of it, other than to quantize them."""
    record: set[int] = set()
    _records.of_thread.append(record)
    try:
        yield record
    finally:
        _records.of_thread.pop()


def note_read(weight: Any) -> None:
    """Record that something reads the values of `weight`."""
    for record in _records.of_thread:
        record.add(key_of(weight))
