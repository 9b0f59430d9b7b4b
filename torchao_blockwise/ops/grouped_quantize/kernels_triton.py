"""Grouped quantisation in Triton: a launch a copy, by the kernels of quantize, led by the table of blocks.

Where both copies come from one read without groups (kernels_gluon.py of quantize), they do with groups.

tokens [M, K]          rowwise     tiles of tokens, as without groups; zeros from the end of the last group on
  │ ▒▒▒▒▒▒▒▒▒ │        columnwise  tiles of padded tokens: a tile starts at any token, as a group does, and is written
  │ ▓▓▓▓▓▓▓   │                    to columns from a multiple of B on
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.group_tables.kernels_triton import block_table
from torchao_blockwise.ops.groups import padded_tokens
from torchao_blockwise.ops.quantize import kernels_triton as triton


def quantize(
    x: torch.Tensor,
    group_ends: torch.Tensor,
    fmt: BlockFormat,
    tensor_amax: torch.Tensor | None,
    rowwise: bool,
    columnwise: bool,
    power_of_2_scales: bool,
    group_tables: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """(qdata, scale) of each copy of `x` [M, K] that is asked for, rowwise first, as the reference makes them."""
    tokens, block = x.shape[0], fmt.block[1]
    blocks = block_table(group_ends, tokens, block, group_tables)
    rows = padded_tokens(tokens, group_ends.shape[0], block)
    warps = triton._FP8_BOTH_GLUON_WARPS
    if warps is not None and rowwise and columnwise and triton.why_not_gluon(fmt, x) is None:
        from torchao_blockwise.ops.quantize import kernels_gluon as gluon

        return [*gluon.quantize_both(x, fmt, power_of_2_scales, warps, blocks, rows)]
    copies: list[torch.Tensor] = []
    if rowwise:
        copies += triton.quantize(x, fmt, tensor_amax, True, False, power_of_2_scales, blocks)
    if columnwise:
        copies += triton.quantize(x, fmt, tensor_amax, False, True, power_of_2_scales, blocks, rows)
    return copies
