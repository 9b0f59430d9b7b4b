"""Merge: whole payloads from gathered flat shards, which may share a byte where they meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from torchao_blockwise.formats import BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.shards.flat import check_devices, described, shard_entries
from torchao_blockwise.ops.shards.merge import reference


def merge_shards_(
    targets: Sequence[torch.Tensor],
    shards: Sequence[Sequence[torch.Tensor]],
    starts: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    columns: Sequence[int],
    fmt: BlockFormat | str,
    *,
    backend: Backend | str | None = None,
) -> None:
    """Write gathered shards to whole payloads: of an entry that two shards share each gives the part that it owns.

    targets: payloads [.., h, packed(w)], contiguous. columns: w of each.
    shards, starts, lengths: lists for each target, an entry a rank: the bytes that `partial_cast_` writes
        (into="entries"), at least as many as `shard_entries` says; the first element; the number of elements, 0 too.
    Elements that no shard covers stay as they are; two shards must not cover the same one.
    Raises ValueError for sizes, devices or a backend.
    """
    op, fmt = "merge_shards_", get_format(fmt)
    if not len(targets) == len(shards) == len(starts) == len(lengths) == len(columns):
        sizes = [len(x) for x in (targets, shards, starts, lengths, columns)]
        raise ValueError(f"{op}: targets, shards, starts, lengths and columns must be as many, got {sizes}")
    for target, pieces, firsts, counts, width in zip(targets, shards, starts, lengths, columns):
        if target.itemsize != 1 or not target.is_contiguous() or target.shape[-1] != fmt.element.packed(width):
            raise ValueError(f"{op}: a target must be contiguous bytes [.., packed({width})], got {described(target)}")
        if not len(pieces) == len(firsts) == len(counts):
            sizes = [len(x) for x in (pieces, firsts, counts)]
            raise ValueError(f"{op}: a target's shards, starts and lengths must be as many, got {sizes}")
        end = 0
        for piece, start, n in sorted(zip(pieces, firsts, counts), key=lambda entry: entry[1]):
            first, entries = shard_entries(start, n, width, fmt)
            if n and (start < end or first + entries > target.numel()):
                raise ValueError(f"{op}: elements [{start}, {start + n}) overlap others or leave {described(target)}")
            if piece.itemsize != 1 or piece.numel() < entries or not piece.is_contiguous():
                raise ValueError(
                    f"{op}: {n} elements from {start} take {entries} contiguous bytes, got {described(piece)}"
                )
            end = start + n if n else end
    counts_of = [len(pieces) for pieces in shards]
    flat = list(itertools.chain.from_iterable(shards))
    numbers = [list(itertools.chain.from_iterable(lists)) for lists in (starts, lengths)]
    check_devices(op, [*targets, *flat])
    if not targets:
        return
    merge_shards_op(list(targets), flat, *numbers, counts_of, list(columns), fmt, backend)


merge_shards_op = Operation(
    "merge_shards_(Tensor(a!)[] targets, Tensor[] shards, SymInt[] starts, SymInt[] lengths, SymInt[] pieces, "
    "SymInt[] columns, str fmt, str backend) -> ()",
    takes=(None, None, None, None, None, None, BlockFormat),
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_triton:merge_shards_"),
        Implementation(Backend.REFERENCE, reference.merge_shards_),
    ],
)
