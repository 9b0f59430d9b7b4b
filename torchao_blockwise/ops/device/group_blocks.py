"""Where each block of padded tokens lies among the tokens: how kernels read the last of the tables of groups.

    tokens   0 ────────── 300 ─── 350 ··· 400      groups of 300 and 50 tokens, and 50 tokens of no group
    blocks   │ 0 │ 1 │  2  │   3   │  4  │          of 128: each group starts one; behind the last group come its like

    entry    (first, live, end, 0): the block begins with token `first`; its tokens before `live` have values, those
             from `live` to `end` belong to no group and count as zeros, and from `end` on it is padding.

A program that quantizes a tile reads two or three integers; to search all ends would take as many instructions as half
of a tile does. Entry -1 describes the tokens as a whole: (0, end of the last group, tokens).
"""

import triton
import triton.language as tl

from torchao_blockwise.ops.groups.tables.layout import FIELDS

_FIELDS = tl.constexpr(FIELDS)


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
