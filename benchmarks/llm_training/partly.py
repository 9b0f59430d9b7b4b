"""Linear layers of which only some operands, or the operands of one GEMM, are quantized: what each costs in loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Operands, and GEMMs: output = x · wᵀ, grad_input = dy · w, grad_weight = dyᵀ · x.
PARTS = ("x", "w", "dy", "output", "grad_input", "grad_weight")


class PartlyQuantizedLinear(nn.Linear):
    """A linear layer without bias whose three GEMMs are in bf16, of operands that were quantized and decoded.

    part: an operand, which is quantized in both GEMMs that read it, or a GEMM, of which both operands are. Scales and
    blocks are those of a converted layer, rounded to nearest; decoded values are rounded to bf16, an error of 0.2 %.
    """

    def __init__(self, weight: nn.Parameter, fmt: str, part: str):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.fmt, self.part = weight, fmt, part
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., in_features]."""
        return _Linear.apply(x.bfloat16(), self.weight.bfloat16(), self.fmt, self.part)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fmt}, only {self.part}"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, fmt, part):
        ctx.save_for_backward(x, w)
        ctx.how = fmt, part
        return F.linear(_operand(x, "x", "output", fmt, part), _operand(w, "w", "output", fmt, part))

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = _operand(dy, "dy", "grad_input", *ctx.how) @ _operand(w, "w", "grad_input", *ctx.how)
        dy, x = (_operand(v.flatten(0, -2), name, "grad_weight", *ctx.how) for v, name in ((dy, "dy"), (x, "x")))
        return dx, dy.T @ x, None, None


def _operand(values: torch.Tensor, name: str, gemm: str, fmt: str, part: str) -> torch.Tensor:
    """An operand as this GEMM sees it, in its shape and dtype; blocks of `grad_weight` run along the tokens."""
    from common.products import RECIPES as FORMATS

    if part not in (name, gemm):
        return values
    of_activations, of_weights, _ = FORMATS[fmt]
    blocks = of_weights if name == "w" else of_activations
    return decoded(values.flatten(0, -2), blocks.name, gemm == "grad_weight", values.dtype).view_as(values)


def decoded(x: torch.Tensor, fmt: str, columnwise: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of the copy of x [.., M, K] in this format, in the shape of `x` and in `dtype`."""
    from torchao_blockwise import ops

    copies = ops.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise)
    if columnwise:
        return ops.dequantize(copies.columnwise, dtype=dtype, columns=x.shape[-2]).mT
    return ops.dequantize(copies.rowwise, dtype=dtype, columns=x.shape[-1])
