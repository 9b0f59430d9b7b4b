"""Blockwise dequantisation in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantize.reference import expand_blocks


def decode_blocks(qdata: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat, columns: int) -> torch.Tensor:
    """fp32 element · block scale [.., M, columns], before any global scale."""
    elements = fmt.element.decode(qdata, columns)
    grid = scale.float().mT if fmt.transposed_scales else scale.float()
    return elements * expand_blocks(grid, fmt, *elements.shape[-2:])


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    fmt: BlockFormat,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x ≈ qdata · scale [· global_scale] in fp32, rounded once to `dtype`: [.., M, columns]."""
    x = decode_blocks(qdata, scale, fmt, columns)
    return (x if global_scale is None else x * global_scale).to(dtype)
