"""Norms, SwiGLU and its gradients in eager torch: the bit oracle, of norms given their statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchao_blockwise.ops.fused import exponential

if TYPE_CHECKING:
    from torchao_blockwise.ops.fused import Norm


def norm_statistics(x: torch.Tensor, layer: bool, eps: float) -> tuple[torch.Tensor | None, torch.Tensor]:
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


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of fp32 `x` from LOW to HIGH; see exponential.py."""
    t = x * exponential.LOG2_E
    n = t.round()
    f = t - n
    highest, *lower = exponential.POLYNOMIAL
    p = torch.full_like(f, highest)
    for coefficient in (*lower, 1.0):
        p = p * f + coefficient
    return (p.view(torch.int32) + (n.int() << exponential.MANTISSA_BITS)).view(torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) of fp32 `x`; see exponential.py."""
    denominator = 1.0 + exp((-x).clamp(exponential.LOW, exponential.HIGH))
    # Tensor over tensor: a scalar numerator may become a product with an inexact reciprocal.
    return torch.ones_like(denominator) / denominator - exponential.LEAST


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """h = (gate · sigmoid(gate)) · up in fp32, rounded to the dtype of `gate`."""
    g, u = gate.float(), up.float()
    return (g * sigmoid(g) * u).to(gate.dtype).contiguous()


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate = (dh · up) · (s · (1 + gate · (1 - s))) and dup = dh · (gate · s), s = sigmoid(gate), as `swiglu`."""
    d, g, u = dh.float(), gate.float(), up.float()
    s = sigmoid(g)
    dgate = d * u * (s * (1.0 + g * (1.0 - s)))
    return dgate.to(gate.dtype).contiguous(), (d * (g * s)).to(gate.dtype).contiguous()
