"""RMSNorm and LayerNorm in eager torch: the bit oracle, given the statistics."""

from __future__ import annotations

import torch

from torchao_blockwise.ops.fused.norm.values import Norm


def statistics(x: torch.Tensor, layer: bool, eps: float) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(mean or None, rstd), fp32 [M], of the rows of `x` [M, K]."""
    x = x.float()
    mean = x.mean(-1) if layer else None
    centred = x if mean is None else x - mean[:, None]
    deviation = (centred.square().mean(-1) + eps).sqrt()
    # Tensor over tensor: devices round a reciprocal square root as they like.
    return mean, torch.ones_like(deviation) / deviation


def normalize(norm: Norm) -> torch.Tensor:
    """y = (x - mean) · rstd · weight + bias, from left to right, each step in fp32; rounded to `dtype` at the end."""
    y = norm.x.float()
    if norm.mean is not None:
        y = y - norm.mean[:, None]
    y = y * norm.rstd[:, None]
    if norm.weight is not None:
        y = y * norm.weight.float()
    if norm.bias is not None:
        y = y + norm.bias.float()
    return y.to(norm.dtype).contiguous()
