"""Groups of tokens in Triton kernels: each program finds the group of its tile, because only the device knows the ends.

    tiles       0   1   2   3 │ 4 │ 5   6 │ 7          each group has separate tiles, and so have the tokens after the
    group       0   0   0   0 │ 2 │ 3   3 │ E          last group (E); later tiles have no tokens

A program loads all ends at once and clamps them: the end of group g becomes the maximum over i <= g of
clamp(ends[i], 0, tokens), so that invalid ends never lead outside the tensors.

Kernels that quantize read the last of the tables of groups instead, with the position of each block of padded tokens:

    tokens   0 ────────── 300 ─── 350 ··· 400      groups of 300 and 50 tokens, and 50 tokens after the last group
    blocks   │ 0 │ 1 │  2  │   3   │  4  │          of 128: each group starts a block, and so do the tokens after them

    entry    (first, live, end, 0): the block starts at token `first`; its tokens before `live` have values, those from
             `live` to `end` are after the last group and count as zeros, and from `end` on it is padding.

A program that quantizes a tile reads two or three integers. Searching all ends would take half as many instructions as
quantizing the tile. Entry -1 describes all tokens: (0, end of the last group, tokens).
"""

import triton
import triton.language as tl

from torchao_blockwise.ops.groups.tables.layout import FIELDS

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _larger_of_pairs(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _merge_tiles(before_a, start_a, first_a, end_a, before_b, start_b, first_b, end_b):
    start, first_tile = tl.maximum(start_a, start_b), tl.maximum(first_a, first_b)
    return before_a + before_b, start, first_tile, tl.minimum(end_a, end_b)


@triton.jit
def _sum_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def load_ends(ends_ptr, tokens, groups, E_PAD: tl.constexpr):
    """(groups, their ends, their sizes), int32 [E_PAD]; groups from `groups` on are empty, at the last end."""
    index = tl.arange(0, E_PAD)
    ends = tl.load(ends_ptr + index, mask=index < groups, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index <= groups), other=0)
    # One scan for both, because a shift between lanes would be a second one.
    ends, starts = tl.associative_scan((tl.minimum(ends, tokens), tl.minimum(starts, tokens)), 0, _larger_of_pairs)
    ends, starts = tl.maximum(ends, 0), tl.maximum(starts, 0)
    return index, ends, ends - starts


@triton.jit
def locate_tile_of_groups(ends_ptr, tile, tokens, groups, TILE: tl.constexpr, E_PAD: tl.constexpr):
    """(group, first token, end of the group) of tile number `tile`; each group starts a tile of TILE tokens.

    ends_ptr: [groups] int32. E_PAD: a power of two, at least `groups`.
    Tiles after those of the last group contain the remaining tokens, with group = groups. Later tiles are empty:
    first token >= end. At most `padded_tokens(tokens, groups + 1, TILE) / TILE` tiles are not empty.
    """
    _, ends, sizes = load_ends(ends_ptr, tokens, groups, E_PAD)
    tile_ends = tl.cumsum((sizes + (TILE - 1)) // TILE, 0)
    # The number of groups that end before this tile, the end of the last of them in tokens and in tiles, and the end of
    # the first other group.
    earlier = tile_ends <= tile
    group, start, first_tile, end = tl.reduce(
        (
            earlier.to(tl.int32),
            tl.where(earlier, ends, 0),
            tl.where(earlier, tile_ends, 0),
            tl.where(earlier, tokens, ends),
        ),
        0,
        _merge_tiles,
    )
    return min(group, groups), start + (tile - first_tile) * TILE, end


@triton.jit
def groups_of(rows, ends_ptr, tokens, groups, E_PAD: tl.constexpr):
    """(group, its first token) of each row; `groups` for rows after the last group."""
    index, ends, _ = load_ends(ends_ptr, tokens, groups, E_PAD)
    earlier = (ends[None, :] <= rows[:, None]) & (index < groups)[None, :]
    return tl.sum(earlier.to(tl.int32), 1), tl.max(tl.where(earlier, ends[None, :], 0), 1)


@triton.jit
def locate_padded_group(ends_ptr, group, tokens, groups, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    """(first, end) block of group number `group` if each group is padded to whole blocks of BLOCK tokens.

    ends_ptr: [groups] int32, the ends before padding. E_PAD: a power of two, at least `groups`.
    """
    index, _, sizes = load_ends(ends_ptr, tokens, groups, E_PAD)
    blocks = (sizes + (BLOCK - 1)) // BLOCK
    first, count = tl.reduce((tl.where(index < group, blocks, 0), tl.where(index == group, blocks, 0)), 0, _sum_pairs)
    return first, first + count


@triton.jit
def load_block(blocks_ptr, block):
    """(first, live, end) of a block, or of each of several; -1 for all tokens."""
    entry = blocks_ptr + (block + 1) * _FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def locate_rows(blocks_ptr, tile_m, M, TILE_M: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """(first, live, end) of the rows of a tile. IN_BLOCKS: whether tiles are blocks of the table.

    Rows before `live` have values, those from `live` to `end` are zeros. blocks_ptr: None without groups.
    """
    if blocks_ptr is None:
        return tile_m * TILE_M, M, M
    elif IN_BLOCKS:
        return load_block(blocks_ptr, tile_m)
    else:
        _, live, end = load_block(blocks_ptr, -1)
        return tile_m * TILE_M, live, end
