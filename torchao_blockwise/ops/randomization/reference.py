"""Transformed and stochastically rounded copies in eager torch: the bit oracle."""

from __future__ import annotations

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
from torchao_blockwise.ops.groups.quantization.reference import amax_of_grid, group_amaxes, group_of, in_groups, padded
from torchao_blockwise.ops.padding import with_zero_tokens
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.quantization.reference import block_scales, expand_blocks, tensor_amax

_BLOCK = HADAMARD_SIZE


def amax_bits(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of the amax of `x` [M, K] and of its transform, int32 scalars; with `per_group` of each group, int32 [E]."""
    tokens = _tokens(x, groups, hadamard)
    if groups is not None and per_group:
        ends, of_chunks = clamped_ends(groups.ends, x.shape[0]), padded_ends(groups.ends, x.shape[0], _BLOCK)
        plain, transformed = group_amaxes(x, ends), group_amaxes(tokens, of_chunks)
    else:
        plain, transformed = tensor_amax(x if groups is None else in_groups(x, groups.ends)), tensor_amax(tokens)
    return plain.view(torch.int32), transformed.view(torch.int32)


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
    if not options.hadamard and key is None:
        if groups is not None:
            return grouped_reference.quantize(x, groups.ends, options, amax)
        return reference.copies(x, options, amax)
    assert amax is not None
    if groups is not None:
        amax = amax_of_grid(amax, x.shape[0], groups.ends, _BLOCK, options.columnwise)
    if options.rowwise:
        made_of = x if groups is None else in_groups(x, groups.ends)
        numbers = None if key is None else _rowwise_numbers(x, groups, key, place)
        return Copies(_round(made_of, options, amax, numbers, key, place), None)
    tokens = _tokens(x, groups, options.hadamard)
    made_of = (with_zero_tokens(tokens) if options.padded and groups is None else tokens).mT
    numbers = None if key is None else _columnwise_numbers(x, groups, key, place, made_of)
    return Copies(None, _round(made_of, options, amax, numbers, key, place))


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
    numbers: torch.Tensor | None,
    key: torch.Tensor | None,
    place: Place,
) -> Operand:
    """`x` [rows, columns] quantized, rounded by the bits of blocks of these numbers; to nearest without a key.

    amax: of what it is made of, or of each block, as it broadcasts.
    """
    if numbers is None or key is None:
        return reference.quantize(x, options, amax)
    x = x.float().contiguous()
    # The random bits have no part in the choice of scales: else the mean would not be kept.
    fmt, scales = options.fmt, block_scales(x, options, amax)
    random = block_bytes(numbers, key, place.operand).flatten(-2)[..., : x.shape[-1]]
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
    group = group_of(row, ends).clamp(max=len(ends) - 1)
    row = place.row + row - starts_of(ends)[group]
    return (row[:, None] * grid + column) | (key[-1] + group)[:, None] << 32


def _columnwise_numbers(
    x: torch.Tensor, groups: Groups | None, key: torch.Tensor, place: Place, copied: torch.Tensor
) -> torch.Tensor:
    """The same of the blocks of its columnwise copy, `copied` [K, tokens]; padding has any."""
    row = (place.row + torch.arange(copied.shape[0], device=x.device))[:, None]
    block = torch.arange(-(-copied.shape[1] // _BLOCK), device=x.device)
    if groups is None:
        return row * (-(-x.shape[0] // _BLOCK) if place.grid < 0 else place.grid) + place.column + block
    ends = padded_ends(groups.ends, x.shape[0], _BLOCK) // _BLOCK
    group = group_of(block, ends).clamp(max=len(ends) - 1)
    first = starts_of(ends)[group]
    grid = ends[group] - first if place.grid < 0 else place.grid
    return (row * grid + place.column + block - first) | (key[-1] + group) << 32
