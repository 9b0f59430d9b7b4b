"""Quantization in eager torch, generic over `BlockFormat`: the bit oracle of the package.

A copy is the rowwise quantization of some matrix: `x` itself, or its transpose, of which tokens may be padded in each
group, and transformed. With random bits, elements are rounded by them and not to nearest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import (
    E2M1,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
    Place,
    block_bytes,
    hadamard_transform,
)
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_ends, padded_rows, padded_tokens, starts_of
from torchao_blockwise.ops.padding import with_zero_tokens

# Of formats that can be transformed and rounded stochastically.
_CHUNK = NVFP4_1X16.block[1]

# --- blocks -----------------------------------------------------------------------------------------------------------


def block_amax(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """max |x| over each block of `x` [.., M, K]: fp32 [.., ⌈M/R⌉, ⌈K/C⌉]. Ragged blocks cover what exists."""
    rows, columns = x.shape[-2:]
    grid_rows, grid_columns = fmt.grid(rows, columns)
    block_rows, block_columns = fmt.block
    padding = (0, grid_columns * block_columns - columns, 0, grid_rows * block_rows - rows)
    magnitude = x.float().abs()
    # Padding copies, by nothing as well.
    padded = F.pad(magnitude, padding) if any(padding) else magnitude
    blocks = padded.unflatten(-2, (grid_rows, block_rows)).unflatten(-1, (grid_columns, block_columns))
    return blocks.amax(dim=(-3, -1))


def expand_blocks(grid: torch.Tensor, fmt: BlockFormat, rows: int, columns: int) -> torch.Tensor:
    """Repeat the value of each block [.., ⌈M/R⌉, ⌈K/C⌉] over its elements: [.., M, K]."""
    block_rows, block_columns = fmt.block
    expanded = grid.repeat_interleave(block_columns, dim=-1)[..., :columns]
    return expanded.repeat_interleave(block_rows, dim=-2)[..., :rows, :]


def quantize_rows(
    x: torch.Tensor, options: CastOptions, amax: torch.Tensor | None = None, random: torch.Tensor | None = None
) -> Operand:
    """qdata = rne(x · encode) of `x` [.., M, K], blocks along K; without the global scale.

    amax: of the tensor, or one for each block, as far as they differ: what broadcasts to the grid of blocks.
    random: uint8 [M, K], the bits by which elements are rounded. They have no part in the choice of scales: else the
        mean would not be kept.
    """
    # A transpose is laid out once; all that follows reads it in order.
    x, fmt = x.float().contiguous(), options.fmt
    scales = fmt.compute_scales(block_amax(x, fmt), amax, options.power_of_2_scales)
    y = x * expand_blocks(scales.encode, fmt, *x.shape[-2:])
    qdata = fmt.element.encode(y) if random is None else E2M1.encode_stochastically(y, random)
    return Operand(qdata, scales.scale.mT.contiguous() if fmt.transposed_scales else scales.scale, None, fmt.name)


# --- tokens in groups -------------------------------------------------------------------------------------------------


def _in_groups(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`x` [M, K] with the rows after the last group set to zero, by clamped ends."""
    return torch.where((torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None], x, torch.zeros_like(x))


def _group_of(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The group in which each row lies, by clamped ends; E for those behind the last one."""
    return torch.searchsorted(ends, rows.to(ends.dtype), right=True)


def value_of_blocks(
    of_groups: torch.Tensor, tokens: int, group_ends: torch.Tensor, block: int, columnwise: bool
) -> torch.Tensor:
    """The value of the group that each block of a copy lies in, 0 behind the last one; a scalar stays as it is.

    of_groups: [E]. Returns what broadcasts to the copy's grid of blocks: [tokens, 1], columnwise [blocks].
    """
    if not of_groups.dim():
        return of_groups
    count, ends = tokens, clamped_ends(group_ends, tokens)
    if columnwise:
        count = padded_tokens(tokens, group_ends.numel(), block) // block
        ends = padded_ends(group_ends, tokens, block) // block
    values = torch.cat((of_groups, of_groups.new_zeros(1)))[_group_of(torch.arange(count, device=ends.device), ends)]
    return values if columnwise else values[:, None]


def _tokens(x: torch.Tensor, groups: Groups | None, block: int, hadamard: int) -> torch.Tensor:
    """The rows of a columnwise copy's transpose: `x`, each group padded to whole blocks, transformed."""
    if groups is not None:
        rows = padded_rows(groups.ends, x.shape[0], block)
        ends, x = padded_ends(groups.ends, x.shape[0], block), torch.cat((x, x.new_zeros(1, x.shape[1])))[rows]
    if hadamard:
        x = hadamard_transform(x, hadamard)
    # Behind the last group zeros stay what they are: a transform may make -0 of them.
    return x if groups is None else _in_groups(x, ends)


# --- operations -------------------------------------------------------------------------------------------------------


def _amax(x: torch.Tensor, ends: torch.Tensor | None = None, each: bool = False) -> torch.Tensor:
    """max |x| of all, or of each matrix or group by clamped ends; 0 of nothing. NaN propagates. Bits, int32."""
    if ends is None or not each:
        x = x if ends is None else _in_groups(x, ends)
        shape, dims = (x.shape[:-2], (-2, -1)) if each else ((), ())
        amax = x.abs().amax(dims).float() if x.numel() else x.new_zeros(shape, dtype=torch.float32)
        return amax.view(torch.int32)
    bits = torch.zeros(ends.numel() + 1, dtype=torch.int32, device=x.device)
    if x.numel():
        group = _group_of(torch.arange(x.shape[0], device=x.device), ends)
        # As integers magnitudes have their order, NaN above all.
        of_rows = x.abs().amax(1).float().view(torch.int32) & torch.iinfo(torch.int32).max
        bits = bits.scatter_reduce(0, group, of_rows, "amax")
    return bits[:-1]


def tensor_amax_bits(x: torch.Tensor, group_ends: torch.Tensor | None, each: bool) -> torch.Tensor:
    """Arguments and result as in the op."""
    return _amax(x, None if group_ends is None else clamped_ends(group_ends, x.shape[0]), each)


def hadamard_amax_bits(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in the op."""
    transformed = _tokens(x, groups, _CHUNK, hadamard)
    if groups is None:
        return _amax(x), _amax(transformed)
    ends, of_chunks = clamped_ends(groups.ends, x.shape[0]), padded_ends(groups.ends, x.shape[0], _CHUNK)
    return _amax(x, ends, per_group), _amax(transformed, of_chunks, per_group)


def quantize(
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    options: CastOptions,
    groups: Groups | None = None,
    key: torch.Tensor | None = None,
    place: Place | None = None,
) -> Copies:
    """Arguments and result as in the op."""
    block = options.fmt.block[1]
    copies: list[Operand | None] = [None, None]
    for columnwise in (False, True):
        if not (options.columnwise if columnwise else options.rowwise):
            continue
        if columnwise:
            rows = _tokens(x, groups, block, options.hadamard)
            rows = (with_zero_tokens(rows) if options.padded and groups is None else rows).mT
        else:
            rows = x if groups is None else _in_groups(x, clamped_ends(groups.ends, x.shape[0]))
        amax = None if amax_bits is None else amax_bits.view(torch.float32)
        if amax is not None and groups is not None:
            amax = value_of_blocks(amax, x.shape[0], groups.ends, block, columnwise)
        elif amax is not None and amax.dim():
            amax = amax[..., None, None]
        random = None
        if key is not None:
            place = place or Place()
            numbers = _block_numbers(x, rows, groups, key, place, columnwise)
            random = block_bytes(numbers, key, place.operand).flatten(-2)[..., : rows.shape[1]]
        by = options._replace(fmt=options.columnwise_format) if columnwise else options
        copies[columnwise] = quantize_rows(rows, by, amax, random)
    return Copies(*copies)


def _block_numbers(
    x: torch.Tensor, copied: torch.Tensor, groups: Groups | None, key: torch.Tensor, place: Place, columnwise: bool
) -> torch.Tensor:
    """The number of each block of a copy in the whole that it is a part of, int64; of padding it may be any.

    copied: the matrix that is quantized rowwise, [M, K] or columnwise [K, tokens].
    """
    row = torch.arange(copied.shape[0], device=x.device)[:, None]
    block = torch.arange(-(-copied.shape[1] // _CHUNK), device=x.device)
    grid: torch.Tensor | int = -(-x.shape[0] // _CHUNK) if columnwise else block.numel()
    high: torch.Tensor | int = 0
    if groups is not None:
        ends = clamped_ends(groups.ends, x.shape[0])
        if columnwise:
            ends = padded_ends(groups.ends, x.shape[0], _CHUNK) // _CHUNK
        group = _group_of(block if columnwise else row, ends).clamp(max=len(ends) - 1)
        first = starts_of(ends)[group]
        if columnwise:
            block, grid = block - first, ends[group] - first
        else:
            row = row - first
        high = (key[-1] + group) << 32
    grid = grid if place.grid < 0 else place.grid
    return ((place.row + row) * grid + place.column + block) | high
