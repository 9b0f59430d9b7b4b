"""The merge of gathered shards in Triton: a launch writes those of many payloads; see `device/tables.py` for how."""

import itertools

import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.device.tables import find_row, load_pointer, make_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.shards.flat import shard_entries

_CHUNK, _CHUNK_WARPS = 1024, 4  # bytes of a program
_FIELDS = tl.constexpr(7)

_LOW = tl.constexpr(0x0F)
_HIGH = tl.constexpr(0xF0)
_BYTE = tl.constexpr(0xFF)


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(table_ptr, count, CHUNK: tl.constexpr):
    """Bytes of a shard to bytes of the whole payload; see `_merge_rows` for the ends."""
    row_ptr, _, chunk = find_row(table_ptr, count, _FIELDS)
    source_ptr = load_pointer(row_ptr + 1, tl.uint8, False)
    target_ptr = load_pointer(row_ptr + 2, tl.uint8, False)
    entries = tl.load(row_ptr + 3)
    first_mask, last_mask = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    beside_last_ptr = load_pointer(row_ptr + 6, tl.uint8, False)

    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    first, last = offs == 0, offs == entries - 1
    own = (tl.where(first, first_mask, _BYTE) & tl.where(last, last_mask, _BYTE)).to(tl.uint8)
    mask = (offs < entries) & (own != 0)
    value = tl.load(source_ptr + offs, mask=mask, other=0)
    others_ptr = tl.where(last, beside_last_ptr, target_ptr + offs)
    others = tl.load(others_ptr, mask=mask & (own != _BYTE), other=0)
    tl.store(target_ptr + offs, (value & own) | (others & (own ^ _BYTE)), mask=mask)


def _merge_rows(target, shards, starts, lengths, columns: int, fmt: BlockFormat):
    """A target's rows of the table, one a shard.

    A byte of two elements whose shards differ is written once, by the shard that has its low nibble, which takes the
    high one from its neighbor's first byte; without a neighbor the target's own nibble stays.
    """
    byte, low, high = 0xFF, _LOW.value, _HIGH.value
    pieces = sorted((piece for piece in zip(starts, lengths, shards) if piece[1]), key=lambda piece: piece[0])
    for i, (start, n, shard) in enumerate(pieces):
        first, entries = shard_entries(start, n, columns, fmt)
        target_ptr = target.data_ptr() + first
        first_mask = last_mask = byte
        beside_last = target_ptr + entries - 1
        if fmt.element.per_byte > 1:
            column, end = start % columns, start + n
            if column % 2 == 1:
                follows = i > 0 and sum(pieces[i - 1][:2]) == start
                first_mask = 0 if follows else high
            if end % columns % 2 == 1:
                last_mask = low
                if i + 1 < len(pieces) and pieces[i + 1][0] == end:
                    beside_last = pieces[i + 1][2].data_ptr()
        yield ceil_div(entries, _CHUNK), shard.data_ptr(), target_ptr, entries, first_mask, last_mask, beside_last


def merge_shards_(targets, shards, starts, lengths, pieces, columns, fmt: BlockFormat) -> None:
    """Write the shards of many payloads to their bytes. Arguments as in the op."""
    ends = itertools.accumulate(pieces, initial=0)
    rows = (
        row
        for target, (a, b), width in zip(targets, itertools.pairwise(ends), columns)
        for row in _merge_rows(target, shards[a:b], starts[a:b], lengths[a:b], width, fmt)
    )
    table = make_table(rows, targets[0].device)
    if table is not None:
        launch(_merge_kernel, table.programs, table.tensor, table.rows, CHUNK=_CHUNK, num_warps=_CHUNK_WARPS)
