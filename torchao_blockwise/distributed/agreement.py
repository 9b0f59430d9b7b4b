"""Agreement: before ranks exchange data by position, they compare once what they are about to exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise.distributed.collective_watchdog import arrived

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

    Every rank of `ranks`, sorted, must call it with the same subject. Entries go through the key-value store that the
    ranks met at, so that it works beside any backend, does not wait for a device, and can name a rank that is missing:
    RuntimeError after the timeout of the process group.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    store = _compat.default_store()
    group = ",".join(map(str, ranks))
    group = hashlib.blake2b(f"{subject} {group}".encode(), digest_size=8).hexdigest()
    me, first = dist.get_rank(), ranks[0]
    # Rounds are counted alike, because all ranks take part in each.
    room = f"torchao_blockwise/{group}"
    room = f"{room}/{store.add(f'{room}/rounds/{me}', 1)}"
    text = "\n".join(entries)
    store.set(f"{room}/text/{me}", text)
    store.set(f"{room}/digest/{me}", _digest(text))
    if me == first:
        store.set(f"{room}/verdict", _why_not_same(store, room, ranks, text))
    elif not arrived(store, [f"{room}/verdict"], 2 * store.timeout):
        raise RuntimeError(f"{subject}: no answer from rank {first}; it failed or runs another program")
    verdict = store.get(f"{room}/verdict").decode()
    if verdict:
        kind = RuntimeError if verdict.startswith("no word") else ValueError
        raise kind(f"{subject}: {verdict}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _why_not_same(store: Store, room: str, ranks: Sequence[int], mine: str) -> str:
    """Empty if all ranks brought `mine`, else what differs; waits for the ranks as long as the store's timeout."""
    keys = {rank: f"{room}/digest/{rank}" for rank in ranks}
    if not arrived(store, list(keys.values()), store.timeout):
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        waited = store.timeout.total_seconds()
        return (
            f"no word from rank {', '.join(map(str, missing))} in {waited:.0f} s; it failed, or its model has none of "
            f"these: {mine.splitlines()[0] if mine else 'nothing'}, ..."
        )
    for rank, key in keys.items():
        if store.get(key).decode() != _digest(mine):
            theirs = store.get(f"{room}/text/{rank}").decode().splitlines()
            pairs = zip_longest(mine.splitlines(), theirs, fillvalue="nothing more")
            a, b = next(((a, b) for a, b in pairs if a != b), ("nothing", "nothing"))
            return f"ranks differ; rank {ranks[0]} has {a}, rank {rank} has {b}; make the same model on all ranks"
    return ""
