"""Grouped quantization in Triton: a launch a copy, by the kernels of quantize, led by the table of blocks.

tokens [M, K]          rowwise     tiles of tokens, as without groups; zeros from the end of the last group on
  │ ▒▒▒▒▒▒▒▒▒ │        columnwise  tiles of padded tokens: a tile starts at any token, as a group does, and is written
  │ ▓▓▓▓▓▓▓   │                    to columns from a multiple of B on
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import CastOptions, Copies, Groups
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.quantization.kernels_triton import copies_of_blocks


def quantize(x: torch.Tensor, groups: Groups, amax_bits: torch.Tensor | None, options: CastOptions) -> Copies:
    """Arguments and result as in the op, bit for bit."""
    blocks = block_table(groups, x.shape[0], options.fmt)
    rows = padded_tokens(x.shape[0], groups.ends.shape[0], options.fmt.block[1])
    rowwise = columnwise = None
    if options.rowwise:
        rowwise = copies_of_blocks(x, amax_bits, options._replace(columnwise=False), blocks).rowwise
    if options.columnwise:
        columnwise = copies_of_blocks(x, amax_bits, options._replace(rowwise=False), blocks, rows).columnwise
    return Copies(rowwise, columnwise)
