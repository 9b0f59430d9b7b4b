"""The positions of the tables of groups in their tensor, which depend on the numbers of tokens and groups."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats import Groups
from torchao_blockwise.ops.gemm.builds import BUILDS, SCHEDULE_FIELDS, TOKEN_ALIGNMENT
from torchao_blockwise.ops.groups.ends import check_group_ends, padded_tokens, smaller

# Fields of an entry of each table: 16 bytes, so that each table starts at a multiple of 16 bytes.
FIELDS = SCHEDULE_FIELDS
# Heights of tiles; each has a schedule.
HEIGHTS = tuple(sorted({build.tile_m for build in BUILDS}, reverse=True))


class Layout(NamedTuple):
    """First entries and lengths, in entries. The schedule along "k" is always the first, at 0."""

    rows: int  # the start of the schedules along "m", in the order of HEIGHTS
    of_rows: int  # their distance, with room for the lowest tiles
    blocks: int  # the start of the table of blocks
    of_blocks: int
    length: int

    def rows_of(self, tile: int) -> int:
        """Return the start of the schedule along "m" for tiles of `tile` rows."""
        return self.rows + HEIGHTS.index(tile) * self.of_rows


def layout_of(tokens: int, groups: int, block: int) -> Layout:
    """Return the layout of `ops.make_groups` for blocks of this length. Numbers may be symbolic."""
    rows = 1 + groups
    of_rows = 1 + count_rows(tokens, groups, HEIGHTS[-1])
    blocks = rows + len(HEIGHTS) * of_rows
    # The tokens after the last group are another one.
    of_blocks = 1 + padded_tokens(tokens, groups + 1, block) // block
    return Layout(rows, of_rows, blocks, of_blocks, blocks + of_blocks)


def count_rows(tokens: int, groups: int, tile: int) -> int:
    """Return the largest number of rows of tiles along "m", including those of tokens after the last group."""
    filled = smaller(groups + 1, tokens)
    # The rows by which a first tile starts before its group count as tokens.
    return padded_tokens(tokens + filled * (TOKEN_ALIGNMENT - 1), filled, tile) // tile


def check_groups(
    op: str, groups: Groups | None, tokens: int, device: torch.device, block: int, *, padded: bool = False
) -> None:
    """Raise unless `groups` is None, or has `tokens` tokens on `device`, and tables for blocks of length `block`.

    For implementations and fakes of operations; see `check_group_ends` for the ends. padded: `tokens` is the padded
    number of a columnwise copy, from which the original one is known only within a block. Tables for another number of
    tokens are detected if their length differs, but tables of other ends are not, because these are on the device.
    Raises TypeError for the dtype of the ends, ValueError otherwise.
    """
    if groups is None:
        return
    check_group_ends(op, groups.ends, tokens, device)
    if groups.tables is None:
        return
    got, count = groups.tables, groups.ends.shape[0]
    fits = got.dtype == torch.int32 and got.device == device and got.dim() == 2
    if fits and type(got.shape[0]) is type(tokens) is int:
        # Traced sizes are symbols.
        least, most = _before_padding(tokens, count, block) if padded else (tokens, tokens)
        fits = layout_of(least, count, block).length <= got.shape[0] <= layout_of(most, count, block).length
        fits = fits and got.is_contiguous()
    if not fits:
        wanted = f"{count} ends, {tokens} tokens{' with their padding' * padded} and blocks of {block}"
        raise ValueError(
            f"{op}: tables of groups must be the result of ops.make_groups for {wanted} on {device}, got {got.dtype} "
            f"of shape {list(got.shape)} on {got.device}; compute them for the same ends, tokens and format, or pass "
            "the ends"
        )


def _before_padding(padded: int, groups: int, block: int) -> tuple[int, int]:
    """Return the smallest and largest number of tokens for which `padded_tokens` returns `padded`."""
    if padded < groups * block:
        # Fewer tokens than groups: each has a block.
        return padded // block, padded // block
    most = padded - (groups - 1) * (block - 1)
    return most - (block - 1), most
