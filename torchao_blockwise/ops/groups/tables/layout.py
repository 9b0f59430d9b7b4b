"""Where the tables of groups lie in their one tensor: what the host knows from the numbers of tokens and of groups."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats import Groups
from torchao_blockwise.ops.gemm.builds import BUILDS, SCHEDULE_FIELDS, TOKEN_ALIGNMENT
from torchao_blockwise.ops.groups.ends import check_group_ends, padded_tokens, smaller

# Of every entry of every table: 16 bytes, so that each table begins on a multiple of them.
FIELDS = SCHEDULE_FIELDS
# Tiles of rows that there are schedules for.
HEIGHTS = tuple(sorted({build.tile_m for build in BUILDS}, reverse=True))


class Layout(NamedTuple):
    """First entries and lengths, in entries. The schedule along "k" comes first, at 0, wherever the others are."""

    rows: int  # where the schedules along "m" begin, in the order of HEIGHTS,
    of_rows: int  # and how far apart they are: with room for the lowest tiles
    blocks: int  # where the table of blocks begins
    of_blocks: int
    length: int

    def rows_of(self, tile: int) -> int:
        """Where the schedule along "m" in tiles of `tile` rows begins."""
        return self.rows + HEIGHTS.index(tile) * self.of_rows


def layout_of(tokens: int, groups: int, block: int) -> Layout:
    """The layout of `ops.make_groups` for a format whose blocks are `block` long. Numbers may be symbolic."""
    rows = 1 + groups
    of_rows = 1 + count_rows(tokens, groups, HEIGHTS[-1])
    blocks = rows + len(HEIGHTS) * of_rows
    # The tokens of no group are a group more.
    of_blocks = 1 + padded_tokens(tokens, groups + 1, block) // block
    return Layout(rows, of_rows, blocks, of_blocks, blocks + of_blocks)


def count_rows(tokens: int, groups: int, tile: int) -> int:
    """How many rows of tiles there are along "m" at most, those of the tokens of no group as well."""
    filled = smaller(groups + 1, tokens)
    # What a first tile begins earlier counts as tokens.
    return padded_tokens(tokens + filled * (TOKEN_ALIGNMENT - 1), filled, tile) // tile


def check_groups(
    op: str, groups: Groups | None, tokens: int, device: torch.device, block: int, *, padded: bool = False
) -> None:
    """Raise unless `groups` are None, or of so many tokens on `device`, with tables for blocks that are `block` long.

    For implementations and fakes of operations; of the ends, see `check_group_ends`.
    padded: `tokens` are those of a columnwise copy, of which how many there were before is known within a block.
    Of the tables, another number of tokens is seen where it changes the length; other ends are not seen: those are on
    the device. Raises TypeError for a dtype, ValueError for a shape, strides or a device.
    """
    if groups is None:
        return
    check_group_ends(op, groups.ends, tokens, device)
    tables = groups.tables
    if tables is None:
        return
    if tables.dtype != torch.int32:
        raise TypeError(f"{op}: tables of groups must be int32, got {tables.dtype}; make them by ops.make_groups")
    if tables.device != device:
        got = f"{device}, got {tables.device}"
        raise ValueError(f"{op}: tables of groups must be on the device of the ends {got}; make them there")
    count, shape = groups.ends.shape[0], tables.shape
    if len(shape) == 2 and type(shape[0]) is type(tokens) is int:
        least, most = _before_padding(tokens, count, block) if padded else (tokens, tokens)
        fits = layout_of(least, count, block).length <= shape[0] <= layout_of(most, count, block).length
        fits = fits and shape[1] == FIELDS and tables.is_contiguous()
    else:
        # Sizes of traced tokens are no more than symbols.
        fits = len(shape) == 2
    if not fits:
        wanted = f"{count} ends, {tokens} tokens{' with their padding' if padded else ''} and blocks of {block}"
        raise ValueError(
            f"{op}: tables of groups must be what ops.make_groups makes of {wanted}, contiguous [entries, {FIELDS}],"
            f" got shape {list(shape)}, stride {tables.stride()}; make them of the same ends, tokens and format, or"
            " pass the ends alone"
        )


def _before_padding(padded: int, groups: int, block: int) -> tuple[int, int]:
    """The fewest and the most tokens of which `padded_tokens` makes so many."""
    if padded < groups * block:
        # Fewer tokens than groups: a block each.
        return padded // block, padded // block
    most = padded - (groups - 1) * (block - 1)
    return most - (block - 1), most
