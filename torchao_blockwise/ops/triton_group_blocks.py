"""Where each block of padded tokens lies among the tokens, as a table that one small launch makes for those after it.

    tokens   0 ────────── 300 ─── 350 ··· 400      groups of 300 and 50 tokens, and 50 tokens of no group
    blocks   │ 0 │ 1 │  2  │   3   │  4  │          of 128: each group starts one; behind the last group come its like

    entry    (first, live, end), int32: the block begins with token `first`; its tokens before `live` have values, those
             from `live` to `end` belong to no group and count as zeros, and from `end` on it is padding.

A program that quantises a tile reads two or three integers; to search all ends would take as many instructions as half
of a tile does. Entry -1 describes the tokens as a whole: (0, end of the last group, tokens).
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.groups import padded_tokens
from torchao_blockwise.ops.launch import launch
from torchao_blockwise.ops.triton_groups import load_ends, locate_tile_of_groups

_FIELDS = tl.constexpr(3)


@triton.jit
def load_block(blocks_ptr, block):
    """(first, live, end) of a block, or of each of several; -1 is the tokens as a whole."""
    entry = blocks_ptr + (block + 1) * _FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def locate_rows(blocks_ptr, tile_m, M, TILE_M: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """(first, live, end) of the rows of a tile, which is a block of the table where it is IN_BLOCKS.

    Rows before `live` have values, up to `end` the tile holds zeros. blocks_ptr: None without groups.
    """
    if blocks_ptr is None:
        return tile_m * TILE_M, M, M
    elif IN_BLOCKS:
        return load_block(blocks_ptr, tile_m)
    else:
        _, live, end = load_block(blocks_ptr, -1)
        return tile_m * TILE_M, live, end


@triton.jit(do_not_specialize=["tokens"])
def _group_blocks_kernel(
    ends_ptr,  # [groups] int32
    blocks_ptr,  # [blocks + 1, 3] int32
    tokens,
    groups,
    BLOCK: tl.constexpr,
    E_PAD: tl.constexpr,
):
    block = tl.program_id(0) - 1
    entry = blocks_ptr + (block + 1) * _FIELDS
    if block < 0:
        _, ends, _ = load_ends(ends_ptr, tokens, groups, E_PAD)
        tl.store(entry, 0)
        tl.store(entry + 1, tl.max(ends, 0))
        tl.store(entry + 2, tokens)
    else:
        group, first, end = locate_tile_of_groups(ends_ptr, block, tokens, groups, BLOCK, E_PAD)
        tl.store(entry, first)
        tl.store(entry + 1, tl.where(group < groups, end, first))
        tl.store(entry + 2, end)


def group_blocks(group_ends: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """The table, int32 [count_blocks(..) + 1, 3], of groups that end at `group_ends`, clamped as by `clamped_ends`."""
    groups = group_ends.shape[0]
    blocks = group_ends.new_empty((count_blocks(tokens, groups, block) + 1, _FIELDS.value))
    launch(
        _group_blocks_kernel, blocks.shape[0],
        group_ends, blocks, tokens, groups, BLOCK=block, E_PAD=triton.next_power_of_2(groups), num_warps=1,
    )  # fmt: skip
    return blocks


def count_blocks(tokens: int, groups: int, block: int) -> int:
    """How many blocks hold all tokens, those of no group as well, which are a group more."""
    return padded_tokens(tokens, groups + 1, block) // block
