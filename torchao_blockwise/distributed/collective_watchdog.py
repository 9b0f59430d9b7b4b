"""Name the ranks that do not enter a collective which fails, or which does not end.

gloo raises where a rank is gone, and names a port at best: then the others ask each other. NCCL raises nothing: a
collective that one rank never enters waits on the device until PyTorch ends the process, and names nobody. With
`watch_collectives`, each rank counts in the store the collectives that it enters, without waiting, and a thread
compares the counts where too much time has passed. The thread asks only the store: a query of the device would break
the capture of a CUDA graph.
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

    Where it does not end, on NCCL, `watch_collectives` names in the log the ranks that did not enter it.
    what: is done, "reduce the amaxes". A rank that failed before, or waits in a collective of others, gives no
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
    """Watches the collectives that this rank entered last, until the process group or another watcher replaces it."""

    def __init__(self) -> None:
        super().__init__(name="torchao_blockwise collective watchdog", daemon=True)
        # Another handle to the store: the first one may be waiting for something else.
        self.store = _compat.default_store().clone()
        self.entered: dict[str, _Entered] = {}

    def run(self) -> None:
        while dist.is_initialized() and _watcher is self:
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


def watch_collectives() -> None:
    """Log which ranks are absent where a collective of this package takes too long on NCCL.

    After 70 % of the timeout of its process group, that is, which is before PyTorch ends the process. Call it on all
    ranks after `init_process_group`: where training hangs, not always, since each rank then writes to the key-value
    store in each forward pass and optimizer step. gloo raises where a rank is gone, and then the error names the ranks.
    Raises ValueError before `init_process_group`.
    """
    global _watcher
    if not dist.is_initialized():
        raise ValueError("watch_collectives: it needs a process group; call it after init_process_group")
    _watcher = _Watcher()
    _watcher.start()


def _enter(subject: str, what: str, group: dist.ProcessGroup) -> None:
    """Count this collective where all ranks see it, if `watch_collectives` was called and NCCL runs it."""
    if _watcher is None or not _watcher.is_alive() or (timeout := _compat.nccl_timeout(group)) is None:
        return
    ranks = sorted(dist.get_process_group_ranks(group))
    room = f"torchao_blockwise/entered/{subject}/{','.join(map(str, ranks))}"
    number = _watcher.entered[room].number + 1 if room in _watcher.entered else 1
    _watcher.store.set(f"{room}/{dist.get_rank()}", str(number))
    what = f"{subject}: rank {dist.get_rank()} waits to {what} with ranks {ranks}"
    _watcher.entered[room] = _Entered(number, time.monotonic(), timeout.total_seconds(), ranks, what)
