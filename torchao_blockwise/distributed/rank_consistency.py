"""Consistency checks between ranks, and errors that name missing ranks when a collective fails.

check_same          before data is exchanged by position: all ranks have the same weights
name_absent_ranks   if a rank is missing, gloo raises but names at most a port: ranks find out which rank it is

Both use the key-value store of the process group: it works with any backend, does not synchronize with a device, and
tells which rank is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchao_blockwise import _compat

# Subjects and values on which the ranks of a group have agreed. Weights do not keep this record: callers may pass new
# tensors in each call (`parameter.data`), and a rank that replaced a weight would compare while the others do not.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()


def check_same_once(subject: str, group: dist.ProcessGroup, what: tuple[object, ...], entries: Iterable[str]) -> None:
    """Call `check_same` on the ranks of `group`, only for the first call with this `what`."""
    agreed = _agreed.setdefault(group, set())
    if group.size() > 1 and (subject, what) not in agreed:
        check_same(subject, sorted(dist.get_process_group_ranks(group)), entries)
        agreed.add((subject, what))


def check_same(subject: str, ranks: Sequence[int], entries: Iterable[str]) -> None:
    """Raise ValueError on all of `ranks` if their `entries` differ, naming a rank and the first entry that differs.

    Every rank of `ranks`, which is sorted, must call it with the same subject. Raises RuntimeError if one does not
    within the timeout of the process group.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    store, me = _compat.default_store(), dist.get_rank()
    prefix = f"torchao_blockwise/{digest(f'{subject} {ranks}'.encode())}"
    # All ranks have the same count, because all take part in each round.
    prefix = f"{prefix}/{store.add(f'{prefix}/rounds/{me}', 1)}"
    text = "\n".join(entries)
    store.set(f"{prefix}/text/{me}", text)
    store.set(f"{prefix}/digest/{me}", digest(text.encode()))
    keys = {rank: f"{prefix}/digest/{rank}" for rank in ranks}
    if missing := _absent(store, keys, store.timeout):
        raise RuntimeError(
            f"{subject}: no answer from {_named(missing)} in {store.timeout.total_seconds():.0f} s; it failed, or its "
            f"model has none of these: {text.splitlines()[0] if text else 'nothing'}, ..."
        )
    first, *others = store.multi_get(list(keys.values()))
    if different := [rank for rank, digest in zip(ranks[1:], others) if digest != first]:
        texts = (store.get(f"{prefix}/text/{rank}").decode().splitlines() for rank in (ranks[0], different[0]))
        a, b = next((a, b) for a, b in zip_longest(*texts, fillvalue="nothing more") if a != b)
        raise ValueError(
            f"{subject}: ranks differ; rank {ranks[0]} has {a}, rank {different[0]} has {b}; create the same model on "
            "all ranks"
        )


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _absent(store: Any, keys: dict[int, str], timeout: datetime.timedelta) -> list[int]:
    """Wait for the keys, and return the ranks whose key is not in the store at the timeout."""
    try:
        store.wait(list(keys.values()), timeout)
    except dist.DistStoreError:
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# --- collectives that fail --------------------------------------------------------------------------------------------

# How long a rank whose collective failed waits for the markers of others. The missing rank never writes one.
_MARKER_TIMEOUT = datetime.timedelta(seconds=30)


@contextlib.contextmanager
def name_absent_ranks(subject: str, what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """A context for a collective: if it fails, raise RuntimeError with the ranks on which it did not fail as well.

    what: the collective, such as "reduce the amaxes". A rank that failed before, or waits in another collective, writes
    no marker.
    """
    try:
        yield
    except RuntimeError as e:
        ranks, me = sorted(dist.get_process_group_ranks(group)), dist.get_rank()
        keys = {rank: f"torchao_blockwise/failed/{subject}/{ranks}/{rank}" for rank in ranks}
        try:
            store = _compat.default_store()
            store.set(keys[me], "")
            wait = min(store.timeout, _MARKER_TIMEOUT)
            absent = _absent(store, keys, wait)
            seconds, cause = f"{wait.total_seconds():.0f} s", "failed before, or busy with another collective"
            why = f"no answer from {_named(absent)} in {seconds}: {cause}" if absent else "all failed"
        except RuntimeError:
            why = "the key-value store is not reachable: the process that hosts it failed, usually rank 0"
        raise RuntimeError(f"{subject}: rank {me} could not {what} with ranks {ranks}; {why}") from e
