"""Schedules: the tiles of a grouped product, in device memory, for persistent programs that take them in turn.

    int32 [1 + entries, 4]

    header      (entries, 0, 0, 0)
    along "m"   an entry for each row of tiles:   (group, the group's first row of tiles, its first token, its end)
    along "k"   an entry for each group:          (group, its first block of tokens, its last block and one, 0)

    group 0: 5 tokens, 1: none, 2: 9; one token in no group; tiles of 8 tokens      (4, ..) (0, 0, 0, 5)
                                                                (2, 1, 5, 14) (2, 1, 5, 14) (-1, 3, 14, 15)

Along "m" a group's first tile begins up to 3 tokens before the group: the copy engine moves the tokens' scales, f32,
from multiples of 16 bytes on only (others are an illegal instruction on an H200). The tokens of no group are one group
behind the last, -1. Along "k" longer groups come before shorter ones: what
programs have at the end, when others have none, is short. Where products are added, empty groups have no entry.

A launch of its own, for what otherwise each producer and consumer would do for each tile: read all ends and sum them
up. Ends that decrease or lie outside the tokens are clamped as everywhere: no entry leads outside the tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.groups import padded_tokens
from torchao_blockwise.ops.launch import launch
from torchao_blockwise.ops.matmul.builds import SCHEDULE_FIELDS, TOKEN_ALIGNMENT
from torchao_blockwise.ops.triton_groups import load_ends

# Entries that a program writes at once.
_CHUNK = 128


@triton.jit
def _tiles_of_rows(start, end, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """How many tiles hold tokens [start, end), where the first begins at a multiple of ALIGNMENT."""
    first = start // ALIGNMENT * ALIGNMENT
    return tl.where(end > start, (end - first + (TILE - 1)) // TILE, 0)


@triton.jit
def _write_entry(schedule_ptr, index, mask, first, second, third, fourth, FIELDS: tl.constexpr):
    ptrs = schedule_ptr + index * FIELDS
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + 1, second, mask=mask)
    tl.store(ptrs + 2, third, mask=mask)
    tl.store(ptrs + 3, fourth, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _schedule_rows_kernel(
    ends_ptr,  # [groups] int32
    schedule_ptr,  # [1 + entries, FIELDS] int32
    tokens,
    groups,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """A program a group, and one for the tokens of no group."""
    group = tl.program_id(0)
    index, ends, sizes = load_ends(ends_ptr, tokens, groups, E_PAD)
    earlier = index < group
    start = tl.max(tl.where(earlier, ends, 0), 0)
    first_tile = tl.sum(tl.where(earlier, _tiles_of_rows(ends - sizes, ends, TILE, ALIGNMENT), 0), 0)
    is_group = group < groups
    end = tl.where(is_group, tl.sum(tl.where(index == group, ends, 0), 0), tokens)
    tiles = _tiles_of_rows(start, end, TILE, ALIGNMENT)
    offsets = tl.arange(0, CHUNK)
    number = tl.where(is_group, group, -1)
    for tile in range(0, tiles, CHUNK):
        mask = tile + offsets < tiles
        _write_entry(schedule_ptr, 1 + first_tile + tile + offsets, mask, number, first_tile, start, end, FIELDS)
    _write_entry(schedule_ptr, 0, group == groups, first_tile + tiles, 0, 0, 0, FIELDS)


@triton.jit(do_not_specialize=["tokens"])
def _schedule_groups_kernel(
    ends_ptr,  # [groups] int32
    schedule_ptr,  # [1 + groups, FIELDS] int32
    tokens,  # padded ones, of which there are no fewer than of others
    groups,
    EMPTY: tl.constexpr,  # whether empty groups have entries
    BLOCK: tl.constexpr,
    E_PAD: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """A program a group."""
    group = tl.program_id(0)
    index, _, sizes = load_ends(ends_ptr, tokens, groups, E_PAD)
    blocks = (sizes + (BLOCK - 1)) // BLOCK
    earlier = index < group
    first = tl.sum(tl.where(earlier, blocks, 0), 0)
    length = tl.sum(tl.where(index == group, blocks, 0), 0)
    longer = (blocks > length) | ((blocks == length) & earlier)
    place = tl.sum(longer.to(tl.int32), 0)
    # Ends that lie among the tokens may, padded, not.
    first, last = tl.minimum(first, tokens // BLOCK), tl.minimum(first + length, tokens // BLOCK)
    _write_entry(schedule_ptr, 1 + place, True, group, first, last, 0, FIELDS)
    entries = groups if EMPTY else tl.sum((sizes > 0).to(tl.int32), 0)
    _write_entry(schedule_ptr, 0, group == 0, entries, 0, 0, 0, FIELDS)


def schedule_rows(group_ends: torch.Tensor, tokens: int, tile: int) -> torch.Tensor:
    """The schedule of a product along "m" in tiles of `tile` tokens. group_ends: [E] int32, of `tokens` tokens."""
    groups = group_ends.shape[0]
    # The tokens of no group are one group more. What a first tile begins earlier counts as tokens.
    filled = min(groups + 1, tokens)
    entries = padded_tokens(tokens + filled * (TOKEN_ALIGNMENT - 1), filled, tile) // tile
    schedule = group_ends.new_empty((1 + entries, SCHEDULE_FIELDS))
    launch(
        _schedule_rows_kernel, groups + 1,
        group_ends, schedule, tokens, groups,
        TILE=tile, ALIGNMENT=TOKEN_ALIGNMENT, E_PAD=triton.next_power_of_2(groups), CHUNK=_CHUNK,
        FIELDS=SCHEDULE_FIELDS, num_warps=4,
    )  # fmt: skip
    return schedule


def schedule_groups(group_ends: torch.Tensor, padded: int, block: int, empty: bool) -> torch.Tensor:
    """The schedule of a product along "k" over `padded` tokens, those of each group padded to whole blocks of `block`.

    group_ends: [E] int32, of tokens that are not padded. empty: whether empty groups have entries.
    """
    groups = group_ends.shape[0]
    schedule = group_ends.new_empty((1 + groups, SCHEDULE_FIELDS))
    launch(
        _schedule_groups_kernel, groups,
        group_ends, schedule, padded, groups,
        EMPTY=empty, BLOCK=block, E_PAD=triton.next_power_of_2(groups), FIELDS=SCHEDULE_FIELDS, num_warps=4,
    )  # fmt: skip
    return schedule
