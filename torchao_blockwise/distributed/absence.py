"""Where an exchange of ranks fails, or does not end, those that are left say who is not there.

gloo raises where a rank is gone, and names a port at best: then the others ask each other. NCCL raises nothing: a
collective that one rank never enters waits on the device until a watchdog ends the process, and names nobody. So on
such groups each rank counts in the store what it enters, without waiting for it, and a thread compares the counts where
too much time has passed. The thread asks the store alone: a query of the device would break a CUDA graph's capture.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchao_blockwise import _compat

if TYPE_CHECKING:
    from torchao_blockwise._compat.torch_types import Store

_log = logging.getLogger("torchao_blockwise")
# How long a rank whose exchange failed waits for word of the others; the culprit never gives it.
_LAST_WORDS = datetime.timedelta(seconds=30)
_WHY = "failed before, or busy with another collective"
# Share of the time that NCCL gives a collective after which it is late.
_PATIENCE = 0.7
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def naming_absent(subject: str, what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Where the collective inside of it fails, raise RuntimeError that names the ranks that did not see it fail too.

    Where it does not end, on NCCL, the ranks that did not enter it are named in the log, before a watchdog ends the
    process. what: is done, "reduce the amaxes". A rank that failed before, or waits in a collective of others, gives no
    word.
    """
    _enter(subject, what, group)
    try:
        yield
    except RuntimeError as e:
        ranks = sorted(dist.get_process_group_ranks(group))
        raise RuntimeError(
            f"{subject}: rank {dist.get_rank()} could not {what} with ranks {ranks}; {_who_is_absent(subject, ranks)}"
        ) from e


def _who_is_absent(subject: str, ranks: Sequence[int]) -> str:
    room = f"torchao_blockwise/failed/{subject}/{','.join(map(str, ranks))}"
    keys = {rank: f"{room}/{rank}" for rank in ranks}
    try:
        store = _compat.default_store()
        store.set(keys[dist.get_rank()], "")
        wait = min(store.timeout, _LAST_WORDS)
        if arrived(store, list(keys.values()), wait):
            return "all of them saw it fail"
        absent = [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:
        return "the store that they met at is gone: the process that held it failed, rank 0 as a rule"
    return f"no word from {_named(absent)} in {wait.total_seconds():.0f} s: {_WHY}"


def arrived(store: Store, keys: list[str], timeout: datetime.timedelta) -> bool:
    """Whether all keys are in the store before the timeout."""
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        return False
    return True


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass
class _Entered:
    """The last of the collectives of a kind that this rank entered, and how many that makes.

    timeout: seconds that NCCL gives it. is_due: the others' counts are yet to be looked at.
    """

    number: int
    at: float
    timeout: float
    ranks: list[int]
    what: str
    is_due: bool = True


class _Watcher(threading.Thread):
    """Looks after the collectives that this rank entered last, until its ranks part."""

    def __init__(self) -> None:
        super().__init__(name="torchao_blockwise absence", daemon=True)
        # Another handle to the store: the first one may be waiting for something else.
        self.store = _compat.default_store().clone()
        self.entered: dict[str, _Entered] = {}

    def run(self) -> None:
        while dist.is_initialized():
            pause = _POLL_SECONDS
            for room, entered in list(self.entered.items()):
                late = entered.at + _PATIENCE * entered.timeout - time.monotonic()
                if entered.is_due and late <= 0:
                    entered.is_due = False
                    self._report(room, entered)
                elif entered.is_due:
                    pause = min(pause, late)
            time.sleep(pause)

    def _report(self, room: str, entered: _Entered) -> None:
        """Log which ranks have entered fewer of these collectives than this one has, if any."""
        keys = {rank: f"{room}/{rank}" for rank in entered.ranks}
        try:
            counts = {rank: int(self.store.get(key)) if self.store.check([key]) else 0 for rank, key in keys.items()}
        except RuntimeError:
            _log.error("%s; the store that they met at is gone: the process that held it failed", entered.what)
            return
        if absent := [rank for rank, count in counts.items() if count < entered.number]:
            seconds = time.monotonic() - entered.at
            _log.error("%s; after %.0f s there is no word from %s: %s", entered.what, seconds, _named(absent), _WHY)


_watcher: _Watcher | None = None


def _enter(subject: str, what: str, group: dist.ProcessGroup) -> None:
    """Count this collective where all ranks see it, if nobody else would notice one that is missing."""
    global _watcher
    timeout = _compat.nccl_timeout(group)
    if timeout is None:
        return
    if _watcher is None or not _watcher.is_alive():
        _watcher = _Watcher()
        _watcher.start()
    ranks = sorted(dist.get_process_group_ranks(group))
    room = f"torchao_blockwise/entered/{subject}/{','.join(map(str, ranks))}"
    number = _watcher.entered[room].number + 1 if room in _watcher.entered else 1
    _compat.default_store().set(f"{room}/{dist.get_rank()}", str(number))
    what = f"{subject}: rank {dist.get_rank()} waits to {what} with ranks {ranks}"
    _watcher.entered[room] = _Entered(number, time.monotonic(), timeout.total_seconds(), ranks, what)
