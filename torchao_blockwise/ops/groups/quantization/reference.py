"""Grouped quantization in eager torch: tokens without a group set to zero, groups padded, then the plain reference."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import CastOptions, Copies
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_rows
from torchao_blockwise.ops.quantization import reference


def in_groups(x: torch.Tensor, group_ends: torch.Tensor) -> torch.Tensor:
    """`x` [M, K] with the rows after the last group set to zero."""
    tokens = x.shape[0]
    rows = torch.arange(tokens, device=x.device)
    return torch.where((rows < clamped_ends(group_ends, tokens)[-1])[:, None], x, torch.zeros_like(x))


def padded(x: torch.Tensor, group_ends: torch.Tensor, block: int) -> torch.Tensor:
    """`x` [M, K] with each group followed by zero rows up to a multiple of `block`: [padded_tokens(..), K]."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))[padded_rows(group_ends, x.shape[0], block)]


def tensor_amax(x: torch.Tensor, group_ends: torch.Tensor) -> torch.Tensor:
    """max |x| over the rows in groups as an fp32 scalar; 0 where there are none. NaN propagates."""
    return reference.tensor_amax(in_groups(x, group_ends))


def quantize(x: torch.Tensor, group_ends: torch.Tensor, options: CastOptions, amax: torch.Tensor | None) -> Copies:
    """The copies of `x` [M, K] that are asked for."""
    rowwise = columnwise = None
    if options.rowwise:
        rowwise = reference.quantize(in_groups(x, group_ends), options, amax)
    if options.columnwise:
        columnwise = reference.quantize(padded(x, group_ends, options.fmt.block[1]).mT, options, amax)
    return Copies(rowwise, columnwise)
