"""Grouped quantization in eager torch: tokens without a group set to zero, groups padded, then the plain reference."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import CastOptions, Copies
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_ends, padded_rows, padded_tokens
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


def amax_bits(x: torch.Tensor, group_ends: torch.Tensor | None, each: bool) -> torch.Tensor:
    """Bits of the amax of `x`, or of its rows in groups; each: of every group, or of every matrix of `x`."""
    if group_ends is None:
        amax = reference.matrix_amaxes(x) if each else reference.tensor_amax(x)
    else:
        amax = group_amaxes(x, clamped_ends(group_ends, x.shape[0])) if each else tensor_amax(x, group_ends)
    return amax.view(torch.int32)


def group_of(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The group in which each row lies, by clamped ends; E for those behind the last one."""
    return torch.searchsorted(ends, rows.to(ends.dtype), right=True)


def group_amaxes(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`tensor_amax` of the rows of each group, fp32 [E], of groups that end at these clamped ends."""
    bits = torch.zeros(ends.numel() + 1, dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return bits[:-1].view(torch.float32)
    group = group_of(torch.arange(x.shape[0], device=x.device), ends)
    # As integers magnitudes have their order, NaN above all.
    of_rows = x.abs().amax(1).float().view(torch.int32) & torch.iinfo(torch.int32).max
    return bits.scatter_reduce(0, group, of_rows, "amax")[:-1].view(torch.float32)


def amax_of_rows(amax: torch.Tensor, rows: int, ends: torch.Tensor) -> torch.Tensor:
    """The amax that each of so many rows is scaled by: that of its group, 0 behind the last one. fp32 [rows]."""
    return torch.cat((amax, amax.new_zeros(1)))[group_of(torch.arange(rows, device=ends.device), ends)]


def amax_of_grid(
    amax: torch.Tensor, tokens: int, group_ends: torch.Tensor, block: int, columnwise: bool
) -> torch.Tensor:
    """The amax of each block of tokens in groups, as it broadcasts to the grid of a copy; one of all stays as it is."""
    if not amax.dim():
        return amax
    if not columnwise:
        return amax_of_rows(amax, tokens, clamped_ends(group_ends, tokens))[:, None]
    blocks = padded_tokens(tokens, group_ends.numel(), block) // block
    return amax_of_rows(amax, blocks, padded_ends(group_ends, tokens, block) // block)


def quantize(x: torch.Tensor, group_ends: torch.Tensor, options: CastOptions, amax: torch.Tensor | None) -> Copies:
    """The copies of `x` [M, K] that are asked for. amax: of the rows in groups, or of each group, [E]."""
    rowwise = columnwise = None
    block = options.fmt.block[1]

    def of_grid(columnwise: bool) -> torch.Tensor | None:
        return None if amax is None else amax_of_grid(amax, x.shape[0], group_ends, block, columnwise)

    if options.rowwise:
        rowwise = reference.quantize(in_groups(x, group_ends), options, of_grid(False))
    if options.columnwise:
        columnwise = reference.quantize(padded(x, group_ends, block).mT, options, of_grid(True))
    return Copies(rowwise, columnwise)
