"""Where the tables of groups lie in their one tensor: what the host knows from the numbers of tokens and of groups."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats import Groups
from torchao_blockwise.ops.gemm.builds import BUILDS, SCHEDULE_FIELDS, TOKEN_ALIGNMENT
from torchao_blockwise.ops.groups.ends import check_group_ends, padded_tokens, smaller

# Of every entry of every table: 16 bytes, so that each table begins on a multiple of them.
FIELDS = SCHEDULE_FIELDS
# Rows of tiles, each with a schedule.
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
    """Raise unless `groups` are None, or of `tokens` tokens on `device`, with tables for blocks that are `block` long.

    For implementations and fakes of operations; of the ends, see `check_group_ends`.
    padded: `tokens` are those of a columnwise copy, of which how many there were before is known within a block.
    Of the tables, another number of tokens is seen where it changes the length; other ends are not seen: those are on
    the device. Raises TypeError for the ends' dtype, ValueError for all else.
    """
    if groups is None:
        return
    check_group_ends(op, groups.ends, tokens, device)
    if groups.tables is None:
        return
    got, count = groups.tables, groups.ends.shape[0]
    fits = got.dtype == torch.int32 and got.device == device and got.dim() == 2
    if fits and type(got.shape[0]) is type(tokens) is int:
        # Sizes of traced tokens are no more than symbols.
        least, most = _before_padding(tokens, count, block) if padded else (tokens, tokens)
        fits = layout_of(least, count, block).length <= got.shape[0] <= layout_of(most, count, block).length
        fits = fits and got.is_contiguous()
    if not fits:
        wanted = f"{count} ends, {tokens} tokens{' with their padding' * padded} and blocks of {block}"
        raise ValueError(
            f"{op}: tables of groups must be what ops.make_groups makes of {wanted} on {device}, got {got.dtype} of "
            f"shape {list(got.shape)} on {got.device}; make them of the same ends, tokens and format, or pass the ends"
        )


def _before_padding(padded: int, groups: int, block: int) -> tuple[int, int]:
    """The fewest and the most tokens of which `padded_tokens` makes `padded`."""
    if padded < groups * block:
        # Fewer tokens than groups: a block each.
        return padded // block, padded // block
    most = padded - (groups - 1) * (block - 1)
    return most - (block - 1), most
