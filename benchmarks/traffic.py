"""What sharded training sends, seen while it runs: gathers with their bytes, and the time of scale syncs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise.distributed.fsdp import root


def mark(device: torch.device) -> Any:
    """A point in time on the device's current stream, the clock's on a CPU; see `us_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def us_between(start: Any, end: Any) -> float:
    """Microseconds between two marks that the device has passed."""
    return (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3


@dataclass
class Observed:
    """What ran since `clear`: all-gathers and their bytes, and the spans of syncs and of their all-reduces."""

    device: torch.device
    gathers: int = 0
    gathered_bytes: int = 0
    syncs: list[tuple[Any, Any]] = field(default_factory=list)
    reduces: list[tuple[Any, Any]] = field(default_factory=list)

    def clear(self) -> None:
        self.gathers = self.gathered_bytes = 0
        self.syncs, self.reduces = [], []

    def count(self, gather: Callable) -> Callable:
        """`gather`, whose first argument is what all ranks' parts are gathered into."""

        def counted(output_tensor, *args, **kwargs):
            self.gathers += 1
            self.gathered_bytes += output_tensor.nbytes
            return gather(output_tensor, *args, **kwargs)

        return counted

    def timed(self, call: Callable, spans: str) -> Callable:
        """`call`, each run of which goes into the list `spans`."""

        def timed(*args, **kwargs):
            start = mark(self.device)
            result = call(*args, **kwargs)
            getattr(self, spans).append((start, mark(self.device)))
            return result

        return timed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe until the block ends."""
        # Names of one release call each other's implementation, not each other, so nothing counts twice.
        names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]
        replaced = [(dist, name, self.count(getattr(dist, name))) for name in names]
        replaced.append((dist, "all_reduce", self.timed(dist.all_reduce, "reduces")))
        # What `sync_weight_scales` and the hook of a root's forward pass share, for the weights of one process group.
        replaced.append((root, "sync_group", self.timed(root.sync_group, "syncs")))
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        try:
            for owner, name, function in replaced:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)
