"""Blockwise dequantization in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat, Operand
from torchao_blockwise.ops.quantization.reference import expand_blocks


def decode_blocks(qdata: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat, columns: int) -> torch.Tensor:
    """fp32 element · block scale [.., M, columns], before any global scale."""
    elements = fmt.element.decode(qdata, columns)
    grid = scale.float().mT if fmt.transposed_scales else scale.float()
    return elements * expand_blocks(grid, fmt, *elements.shape[-2:])


def dequantize(x: Operand, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """x ≈ qdata · scale [· global_scale] in fp32, rounded once to `dtype`: [.., M, columns]."""
    values = decode_blocks(x.qdata, x.scale, x.format, columns)
    # One of all, or of each matrix.
    return (values if x.global_scale is None else values * x.global_scale[..., None, None]).to(dtype)
