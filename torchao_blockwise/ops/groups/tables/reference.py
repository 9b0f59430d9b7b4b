"""Tables of groups in eager torch: for each entry the group that it belongs to, by where groups' entries end."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.gemm.builds import TOKEN_ALIGNMENT
from torchao_blockwise.ops.groups.ends import clamped_ends, starts_of
from torchao_blockwise.ops.groups.tables.layout import FIELDS, HEIGHTS, layout_of


def group_tables(group_ends: torch.Tensor, tokens: int, fmt: BlockFormat) -> torch.Tensor:
    """The tables of `ops.make_groups`; entries of schedules that nothing reads are zeros."""
    groups, block = group_ends.shape[0], fmt.block[1]
    layout = layout_of(tokens, groups, block)
    tables = group_ends.new_zeros((layout.length, FIELDS))
    # The tokens of no group are a group more.
    ends = torch.cat((clamped_ends(group_ends, tokens), group_ends.new_full((1,), tokens)))
    starts = starts_of(ends)
    blocks = _ceil_div(ends - starts, block)

    order = blocks[:-1].argsort(descending=True, stable=True)
    last = blocks.cumsum(0)
    tables[0, 0], tables[0, 1] = groups, (blocks[:-1] > 0).sum()
    tables[1 : layout.rows, :3] = torch.stack((order, (last - blocks)[order], last[order]), 1)

    for tile in HEIGHTS:
        rows = torch.where(ends > starts, _ceil_div(ends - starts // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT, tile), 0)
        group, _ = _group_of_entries(rows, layout.of_rows - 1)
        number = torch.where(group < groups, group, -1)
        entries = torch.stack((number, (rows.cumsum(0) - rows)[group], starts[group], ends[group]), 1)
        first, used = layout.rows_of(tile), rows.sum()
        tables[first, 0] = used
        is_used = torch.arange(len(entries), device=ends.device) < used
        tables[first + 1 : first + layout.of_rows] = torch.where(is_used[:, None], entries, 0)

    group, place = _group_of_entries(blocks, layout.of_blocks - 1)
    live = torch.where(group < groups, ends[group], starts[-1])
    tables[layout.blocks, 1], tables[layout.blocks, 2] = starts[-1], tokens
    tables[layout.blocks + 1 :, :3] = torch.stack((starts[group] + place * block, live, ends[group]), 1)
    return tables


def _ceil_div(x: torch.Tensor, length: int) -> torch.Tensor:
    return (x + (length - 1)) // length


def _group_of_entries(counts: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(group, number within it) of each of the `entries`, of which groups have `counts`; the rest are the last's."""
    last = counts.cumsum(0)
    entry = torch.arange(entries, device=counts.device)
    group = torch.searchsorted(last, entry, right=True).clamp(max=len(counts) - 1)
    return group, entry - (last - counts)[group]
