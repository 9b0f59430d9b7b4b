"""Grouped quantization in Gluon: both copies of tokens in groups from one read, by the kernel of quantize."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import CastOptions, Copies, Groups
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.quantization.kernels_gluon import copies_of_blocks


def quantize(x: torch.Tensor, groups: Groups, amax_bits: None, options: CastOptions) -> Copies:
    """Arguments and result as in the op, bit for bit, within what `gluon_tiles.why_not` admits."""
    blocks = block_table(groups, x.shape[0], options.fmt)
    rows = padded_tokens(x.shape[0], groups.ends.shape[0], options.fmt.block[1])
    return copies_of_blocks(x, options, blocks, rows)
