"""Ranks compare what they are about to exchange, and name who is absent where a collective fails or does not end.

check_same          before data is exchanged by position: the same weights on all ranks
naming_absent       gloo raises where a rank is gone, and names a port at best: the others ask each other
watch_collectives   NCCL raises nothing: a collective that one rank never enters waits on the device until PyTorch ends
                    the process, and names nobody. A thread compares which collectives the ranks have entered.

All goes through the key-value store that the ranks met at: it works with any backend, waits for no device, and can name
a rank that is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchao_blockwise import _compat

if TYPE_CHECKING:
    from torchao_blockwise._compat.torch_types import Store

# What the ranks of a group have found to be the same, as long as the group lives.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()


def check_same_once(subject: str, group: dist.ProcessGroup, what: tuple[object, ...], entries: Iterable[str]) -> None:
    """`check_same` on the ranks of `group`, the first time that they come with the same `what`."""
    agreed = _agreed.setdefault(group, set())
    if group.size() > 1 and (subject, what) not in agreed:
        check_same(subject, sorted(dist.get_process_group_ranks(group)), entries)
        agreed.add((subject, what))


def check_same(subject: str, ranks: Sequence[int], entries: Iterable[str]) -> None:
    """Raise ValueError on all of `ranks` if their `entries` differ, naming a rank and the first entry that differs.

    Every rank of `ranks`, sorted, must call it with the same subject; RuntimeError after the timeout of the process
    group where one does not.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    store, me = _compat.default_store(), dist.get_rank()
    room = f"torchao_blockwise/{_digest(f'{subject} {ranks}')}"
    # Rounds are counted alike, because all ranks take part in each.
    room = f"{room}/{store.add(f'{room}/rounds/{me}', 1)}"
    text = "\n".join(entries)
    store.set(f"{room}/text/{me}", text)
    store.set(f"{room}/digest/{me}", _digest(text))
    keys = {rank: f"{room}/digest/{rank}" for rank in ranks}
    if missing := _absent(store, keys, store.timeout):
        raise RuntimeError(
            f"{subject}: no word from {_named(missing)} in {store.timeout.total_seconds():.0f} s; it failed, or its "
            f"model has none of these: {text.splitlines()[0] if text else 'nothing'}, ..."
        )
    first, *others = store.multi_get(list(keys.values()))
    if different := [rank for rank, digest in zip(ranks[1:], others) if digest != first]:
        texts = (store.get(f"{room}/text/{rank}").decode().splitlines() for rank in (ranks[0], different[0]))
        a, b = next((a, b) for a, b in zip_longest(*texts, fillvalue="nothing more") if a != b)
        raise ValueError(
            f"{subject}: ranks differ; rank {ranks[0]} has {a}, rank {different[0]} has {b}; make the same model on "
            "all ranks"
        )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _absent(store: Store, keys: dict[int, str], timeout: datetime.timedelta) -> list[int]:
    """The ranks whose key is not in the store before the timeout."""
    try:
        store.wait(list(keys.values()), timeout)
    except dist.DistStoreError:
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# --- collectives that fail, or do not end -----------------------------------------------------------------------------

_log = logging.getLogger("torchao_blockwise")
# How long a rank whose exchange failed waits for word of the others; the culprit never gives it.
_LAST_WORDS = datetime.timedelta(seconds=30)
_WHY = "failed before, or busy with another collective"
_STORE_GONE = "the store that they met at is gone: the process that held it failed, rank 0 as a rule"
# Share of the time that NCCL gives a collective after which it is late.
_PATIENCE = 0.7


@contextlib.contextmanager
def naming_absent(subject: str, what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Where the collective inside of it fails, raise RuntimeError that names the ranks that did not see it fail too.

    what: is done, "reduce the amaxes". A rank that failed before, or waits in a collective of others, gives no word.
    """
    if _watcher is not None:
        _watcher.enter(subject, what, group)
    try:
        yield
    except RuntimeError as e:
        ranks, me = sorted(dist.get_process_group_ranks(group)), dist.get_rank()
        keys = {rank: f"torchao_blockwise/failed/{subject}/{ranks}/{rank}" for rank in ranks}
        try:
            store = _compat.default_store()
            store.set(keys[me], "")
            wait = min(store.timeout, _LAST_WORDS)
            absent = _absent(store, keys, wait)
            why = f"no word from {_named(absent)} in {wait.total_seconds():.0f} s: {_WHY}" if absent else "all saw it"
        except RuntimeError:
            why = _STORE_GONE
        raise RuntimeError(f"{subject}: rank {me} could not {what} with ranks {ranks}; {why}") from e


@dataclass
class _Entered:
    """The last collective of a kind that this rank entered, how many that makes, and when it is late."""

    number: int
    at: float
    late: float
    ranks: list[int]
    what: str


class _Watcher(threading.Thread):
    """Watches the collectives that this rank entered last, until the process group or another watcher replaces it.

    It asks only the store: a query of the device would break the capture of a CUDA graph.
    """

    def __init__(self) -> None:
        super().__init__(name="torchao_blockwise collective watchdog", daemon=True)
        # Another handle to the store: the first one may be waiting for something else.
        self.store = _compat.default_store().clone()
        self.entered: dict[str, _Entered] = {}

    def enter(self, subject: str, what: str, group: dist.ProcessGroup) -> None:
        """Count this collective where all ranks see it, if NCCL runs it."""
        if not self.is_alive() or (timeout := _compat.nccl_timeout(group)) is None:
            return
        ranks, now = sorted(dist.get_process_group_ranks(group)), time.monotonic()
        room = f"torchao_blockwise/entered/{subject}/{ranks}"
        number = self.entered[room].number + 1 if room in self.entered else 1
        self.store.set(f"{room}/{dist.get_rank()}", str(number))
        what = f"{subject}: rank {dist.get_rank()} waits to {what} with ranks {ranks}"
        self.entered[room] = _Entered(number, now, now + _PATIENCE * timeout.total_seconds(), ranks, what)

    def run(self) -> None:
        while dist.is_initialized() and _watcher is self:
            for room, entered in list(self.entered.items()):
                if time.monotonic() >= entered.late:
                    entered.late = math.inf
                    self._report(room, entered)
            time.sleep(0.5)

    def _report(self, room: str, entered: _Entered) -> None:
        """Log which ranks have entered fewer of these collectives than this one has, if any."""
        keys = {rank: f"{room}/{rank}" for rank in entered.ranks}
        try:
            counts = {rank: int(self.store.get(key)) if self.store.check([key]) else 0 for rank, key in keys.items()}
        except RuntimeError:
            _log.error("%s; %s", entered.what, _STORE_GONE)
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
