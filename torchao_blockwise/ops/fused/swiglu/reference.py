"""SwiGLU and its gradients in eager torch: the bit oracle."""

from __future__ import annotations

import torch

from torchao_blockwise.ops.fused.swiglu import exponential


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
