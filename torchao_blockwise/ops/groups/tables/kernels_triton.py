"""Tables of groups in Triton, in one launch, with a program for each group, and one for tokens after the last group.

Each program loads all ends, computes the start of its group's entries in each table, and writes them, 128 at a time.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat, Groups
from torchao_blockwise.ops.device.groups import load_ends
from torchao_blockwise.ops.gemm.builds import TOKEN_ALIGNMENT
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.groups.tables.layout import FIELDS, HEIGHTS, layout_of
from torchao_blockwise.ops.launch import launch

_FIELDS = tl.constexpr(FIELDS)
_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)
# Entries that a program writes at once.
_CHUNK = tl.constexpr(128)


@triton.jit
def _tiles_of_rows(start, end, tile):
    """How many tiles hold tokens [start, end), where the first begins at a multiple of the alignment."""
    first = start // _ALIGNMENT * _ALIGNMENT
    return tl.where(end > start, (end - first + (tile - 1)) // tile, 0)


@triton.jit
def _write_entry(ptrs, mask, first, second, third, fourth):
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + 1, second, mask=mask)
    tl.store(ptrs + 2, third, mask=mask)
    tl.store(ptrs + 3, fourth, mask=mask)


@triton.jit
def _write_entries(table_ptr, count, first, step, second, third, fourth):
    """Write `count` entries: the first field of each is `step` more than of the one before, others are alike."""
    for written in range(0, count, _CHUNK):
        i = written + tl.arange(0, _CHUNK)
        _write_entry(table_ptr + i * _FIELDS, i < count, first + i * step, second, third, fourth)


@triton.jit(do_not_specialize=["tokens", "padded_blocks", "of_rows", "of_blocks"])
def _group_tables_kernel(
    ends_ptr,  # [groups] int32
    tables_ptr,  # [.., FIELDS] int32
    tokens,
    groups,
    padded_blocks,  # of the groups when each is padded to whole blocks: entries along "k" lead no further
    of_rows,  # entries of a schedule along "m",
    of_blocks,  # and of the table of blocks
    BLOCK: tl.constexpr,
    HEIGHTS: tl.constexpr,
    E_PAD: tl.constexpr,
):
    group = tl.program_id(0)
    index, ends, sizes = load_ends(ends_ptr, tokens, groups, E_PAD)
    earlier = index < group
    is_group = group < groups
    start = tl.max(tl.where(earlier, ends, 0), 0)
    end = tl.where(is_group, tl.sum(tl.where(index == group, ends, 0), 0), tokens)

    lengths = (sizes + (BLOCK - 1)) // BLOCK
    length = (end - start + (BLOCK - 1)) // BLOCK
    first_block = tl.sum(tl.where(earlier, lengths, 0), 0)
    longer = (lengths > length) | ((lengths == length) & earlier)
    place = tl.sum(longer.to(tl.int32), 0)
    first, last = tl.minimum(first_block, padded_blocks), tl.minimum(first_block + length, padded_blocks)
    _write_entry(tables_ptr + (1 + place) * _FIELDS, is_group, group, first, last, 0)
    _write_entry(tables_ptr, group == groups, groups, tl.sum((sizes > 0).to(tl.int32), 0), 0, 0)

    table_ptr = tables_ptr + (1 + groups) * _FIELDS
    number = tl.where(is_group, group, -1)
    for i in tl.static_range(len(HEIGHTS)):
        first_tile = tl.sum(tl.where(earlier, _tiles_of_rows(ends - sizes, ends, HEIGHTS[i]), 0), 0)
        tiles = _tiles_of_rows(start, end, HEIGHTS[i])
        _write_entries(table_ptr + (1 + first_tile) * _FIELDS, tiles, number, 0, first_tile, start, end)
        _write_entry(table_ptr, group == groups, first_tile + tiles, 0, 0, 0)
        table_ptr += of_rows * _FIELDS

    # Behind the tokens of no group, of which none is live, come blocks that begin where all tokens end or later.
    count = tl.where(is_group, length, of_blocks - 1 - first_block)
    live = tl.where(is_group, end, start)
    _write_entries(table_ptr + (1 + first_block) * _FIELDS, count, start, BLOCK, live, end, 0)
    _write_entry(table_ptr, group == groups, 0, start, tokens, 0)


def group_tables(ends: torch.Tensor, tokens: int, fmt: BlockFormat, padded: int | None = None) -> torch.Tensor:
    """The tables of `ops.make_groups`. padded: the number of tokens with their padding, where that is known."""
    groups, block = ends.shape[0], fmt.block[1]
    layout = layout_of(tokens, groups, block)
    padded = padded_tokens(tokens, groups, block) if padded is None else padded
    tables = ends.new_empty((layout.length, FIELDS))
    launch(
        _group_tables_kernel, groups + 1,
        ends, tables, tokens, groups, padded // block, layout.of_rows, layout.of_blocks,
        BLOCK=block, HEIGHTS=HEIGHTS, E_PAD=triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip
    return tables


def _tables_of(groups: Groups, tokens: int, fmt: BlockFormat, padded: int | None = None) -> torch.Tensor:
    """The tables of these groups, made where there are none."""
    return group_tables(groups.ends, tokens, fmt, padded) if groups.tables is None else groups.tables


def block_table(groups: Groups, tokens: int, fmt: BlockFormat) -> torch.Tensor:
    """The table of blocks of these groups, [blocks + 1, FIELDS]."""
    layout = layout_of(tokens, groups.ends.shape[0], fmt.block[1])
    return _tables_of(groups, tokens, fmt).narrow(0, layout.blocks, layout.of_blocks)


def row_schedule(groups: Groups, tokens: int, fmt: BlockFormat, tile: int) -> torch.Tensor:
    """The schedule along "m" of these groups in tiles of `tile` rows."""
    layout = layout_of(tokens, groups.ends.shape[0], fmt.block[1])
    return _tables_of(groups, tokens, fmt).narrow(0, layout.rows_of(tile), layout.of_rows)


def group_schedule(groups: Groups, padded: int, fmt: BlockFormat) -> torch.Tensor:
    """Tables that begin with the schedule along "k" over `padded` tokens."""
    # How many tokens there were before they were padded is not known, and for this schedule need not be.
    return _tables_of(groups, padded, fmt, padded)
