"""Merge: whole payloads from gathered flat shards, which may share a byte where they meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from torchao_blockwise.formats import BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, get_backend, pick, why_no_triton
from torchao_blockwise.ops.flat_shards import check_devices, described, flat_bytes, shard_entries
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.merge_shards import reference


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
    flat = [list(itertools.chain.from_iterable(lists)) for lists in (shards, starts, lengths)]
    check_devices(op, [*targets, *flat[0]])
    merge_shards_op(list(targets), *flat, counts_of, list(columns), fmt.name, get_backend(backend).value)


def _merge_shards(targets, shards, starts, lengths, pieces, columns, format, backend):
    if not targets:
        return
    fmt, targets, shards = get_format(format), flat_bytes(targets), flat_bytes(shards)
    reasons = {Backend.TRITON: why_no_triton(targets[0].device), Backend.REFERENCE: None}
    expected = Backend.TRITON if targets[0].is_cuda else None
    chosen = pick("merge_shards_", backend, reasons, expected=expected)
    end = 0
    of_targets = []
    for count in pieces:
        part = slice(end, end + count)
        of_targets.append((shards[part], starts[part], lengths[part]))
        end += count
    if chosen is Backend.TRITON:
        from torchao_blockwise.ops.merge_shards import kernels_triton as triton

        triton.merge_shards_(targets, of_targets, columns, fmt)
        return
    for target, parts, width in zip(targets, of_targets, columns):
        reference.merge_shards_(target, *parts, width, fmt)


def _merge_shards_fake(targets, shards, starts, lengths, pieces, columns, format, backend):
    """Writes in place."""


merge_shards_op = define_op(
    "merge_shards_(Tensor(a!)[] targets, Tensor[] shards, int[] starts, int[] lengths, int[] pieces, int[] columns,"
    " str format, str backend) -> ()",
    _merge_shards,
    _merge_shards_fake,
)
