"""Blockwise quantization in eager torch, generic over `BlockFormat`: the bit oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import BlockFormat, CastOptions, Copies, Operand, Scales
from torchao_blockwise.ops.padding import with_zero_tokens


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| over the tensor as an fp32 scalar; 0 for an empty tensor. NaN propagates."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


def matrix_amaxes(x: torch.Tensor) -> torch.Tensor:
    """`tensor_amax` of each matrix of `x` [.., M, K], fp32 [..]."""
    if x.numel() == 0:
        return torch.zeros(x.shape[:-2], dtype=torch.float32, device=x.device)
    return x.abs().amax((-2, -1)).float()


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
    """Repeat a value a block [.., ⌈M/R⌉, ⌈K/C⌉] over its elements: [.., M, K]."""
    block_rows, block_columns = fmt.block
    expanded = grid.repeat_interleave(block_columns, dim=-1)[..., :columns]
    return expanded.repeat_interleave(block_rows, dim=-2)[..., :rows, :]


def block_scales(x: torch.Tensor, options: CastOptions, amax: torch.Tensor | None) -> Scales:
    """The scales of each block of fp32 `x` [.., M, K], blocks along K.

    amax: of the tensor, or one for each block, as far as they differ: what broadcasts to the grid of blocks.
    """
    return options.fmt.compute_scales(block_amax(x, options.fmt), amax, options.power_of_2_scales)


def quantize(x: torch.Tensor, options: CastOptions, amax: torch.Tensor | None) -> Operand:
    """qdata = rne(x · encode), rowwise, for `x` [.., M, K]; the global scale is left to who knows it.

    amax: as in `block_scales`.
    """
    # A transpose is laid out once; all that follows reads it in order.
    x = x.float().contiguous()
    fmt, scales = options.fmt, block_scales(x, options, amax)
    encode = expand_blocks(scales.encode, fmt, *x.shape[-2:])
    qdata = fmt.element.encode(x * encode)
    scale = scales.scale.mT.contiguous() if fmt.transposed_scales else scales.scale
    return Operand(qdata, scale, None, fmt.name)


def copies(x: torch.Tensor, options: CastOptions, amax: torch.Tensor | None = None) -> Copies:
    """The copies of `x` [.., M, K] that are asked for. amax: of the tensor, or of each matrix, [..]."""
    if amax is not None and amax.dim():
        amax = amax[..., None, None]
    columns = (with_zero_tokens(x) if options.padded else x).mT
    return Copies(
        quantize(x, options, amax) if options.rowwise else None,
        quantize(columns, options, amax) if options.columnwise else None,
    )
