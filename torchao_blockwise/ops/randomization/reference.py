"""Transformed and stochastically rounded copies in eager torch: the bit oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchao_blockwise.formats import (
    E2M1,
    HADAMARD_SIZE,
    CastOptions,
    Copies,
    Groups,
    Operand,
    Place,
    block_bytes,
    hadamard_transform,
)
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_ends, starts_of
from torchao_blockwise.ops.groups.quantization import reference as grouped_reference
from torchao_blockwise.ops.groups.quantization.reference import amax_of_grid, group_amaxes, in_groups, padded
from torchao_blockwise.ops.padding import with_zero_tokens
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.quantization.reference import block_scales, expand_blocks, tensor_amax

_BLOCK = HADAMARD_SIZE


def amaxes(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The amax of `x` [M, K] and of its transform, fp32 scalars; with `per_group` of each group, fp32 [E]."""
    if groups is not None and per_group:
        ends, of_chunks = clamped_ends(groups.ends, x.shape[0]), padded_ends(groups.ends, x.shape[0], _BLOCK)
        return group_amaxes(x, ends), group_amaxes(_tokens(x, groups, hadamard), of_chunks)
    made_of = x if groups is None else in_groups(x, groups.ends)
    return tensor_amax(made_of), tensor_amax(_tokens(x, groups, hadamard))


def quantize(
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
) -> Copies:
    """Arguments and result as in the op: of copies that are rounded to nearest and not transformed both at once."""
    amax = None if amax_bits is None else amax_bits.view(torch.float32)
    if options.hadamard or key is not None:
        assert amax is not None
        made = copy(x, amax, options, groups, key, place)
        return Copies(made, None) if options.rowwise else Copies(None, made)
    if groups is not None:
        return grouped_reference.quantize(x, groups.ends, options, amax)
    return reference.copies(x, options, amax)


def amax_bits(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in the op."""
    plain, transformed = amaxes(x, hadamard, groups, per_group)
    return plain.view(torch.int32), transformed.view(torch.int32)


def copy(
    x: torch.Tensor,
    amax: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
) -> Operand:
    """The one copy of `x` [M, K] that is asked for.

    amax: of what it is made of, or of each group. key: None for round to nearest.
    """
    if groups is not None:
        amax = amax_of_grid(amax, x.shape[0], groups.ends, _BLOCK, options.columnwise)
    if options.rowwise:
        made_of = x if groups is None else in_groups(x, groups.ends)
        return _round(made_of, options, amax, key, place, lambda key: _rowwise_numbers(x, groups, key, place))
    tokens = _tokens(x, groups, options.hadamard)
    made_of = (with_zero_tokens(tokens) if options.padded and groups is None else tokens).mT
    return _round(made_of, options, amax, key, place, lambda key: _columnwise_numbers(x, groups, key, place, made_of))


def _tokens(x: torch.Tensor, groups: Groups | None, hadamard: int) -> torch.Tensor:
    """What a columnwise copy is made of: tokens padded to whole chunks in each group, and transformed."""
    if groups is None:
        return hadamard_transform(x, hadamard) if hadamard else x
    tokens = padded(x, groups.ends, _BLOCK)
    if not hadamard:
        return tokens
    # Behind the last group zeros stay what they are: a transform may make -0 of them.
    return in_groups(hadamard_transform(tokens, hadamard), padded_ends(groups.ends, x.shape[0], _BLOCK))


def _round(
    x: torch.Tensor,
    options: CastOptions,
    amax: torch.Tensor,
    key: torch.Tensor | None,
    place: Place,
    numbers: Callable[[torch.Tensor], torch.Tensor],
) -> Operand:
    """`x` [rows, columns] quantized, rounded by the bits of blocks of these numbers; to nearest without a key."""
    if key is None:
        return reference.quantize(x, options, amax)
    x = x.float().contiguous()
    # The random bits have no part in the choice of scales: else the mean would not be kept.
    fmt, scales = options.fmt, block_scales(x, options, amax)
    random = block_bytes(numbers(key), key, place.operand).flatten(-2)[..., : x.shape[-1]]
    y = x * expand_blocks(scales.encode, fmt, *x.shape)
    return Operand(E2M1.encode_stochastically(y, random), scales.scale, None, fmt.name)


def _rowwise_numbers(x: torch.Tensor, groups: Groups | None, key: torch.Tensor, place: Place) -> torch.Tensor:
    """The numbers of the blocks of `x` [M, K] in the whole that it is a part of: int64 [M, blocks]."""
    blocks = -(-x.shape[1] // _BLOCK)
    grid = blocks if place.grid < 0 else place.grid
    row = torch.arange(x.shape[0], device=x.device)
    column = place.column + torch.arange(blocks, device=x.device)
    if groups is None:
        return (place.row + row)[:, None] * grid + column
    ends = clamped_ends(groups.ends, x.shape[0])
    group = _group_of(row, ends)
    row = place.row + row - starts_of(ends)[group]
    return (row[:, None] * grid + column) | _experts(key, group)[:, None] << 32


def _columnwise_numbers(
    x: torch.Tensor, groups: Groups | None, key: torch.Tensor, place: Place, copied: torch.Tensor
) -> torch.Tensor:
    """The same of the blocks of its columnwise copy, `copied` [K, tokens]; padding has any."""
    row = (place.row + torch.arange(copied.shape[0], device=x.device))[:, None]
    block = torch.arange(-(-copied.shape[1] // _BLOCK), device=x.device)
    if groups is None:
        return row * (-(-x.shape[0] // _BLOCK) if place.grid < 0 else place.grid) + place.column + block
    ends = padded_ends(groups.ends, x.shape[0], _BLOCK) // _BLOCK
    group = _group_of(block, ends)
    first = starts_of(ends)[group]
    grid = ends[group] - first if place.grid < 0 else place.grid
    return (row * grid + place.column + block - first) | _experts(key, group) << 32


def _experts(key: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Their numbers among all."""
    return key[-1] + group


def _group_of(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The group in which each row lies; the last one for those behind."""
    return torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp(max=ends.numel() - 1)
