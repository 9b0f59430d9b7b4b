"""Which operand costs what: linear layers that multiply in bf16 what chosen operands' FP8 copies decode to.

A layer has three products of two operands each:

    output       x · wᵀ       grad_input   dy · w       grad_weight  dyᵀ · x

An operand that is faked is quantized by `ops.quantize` as the FP8 recipe quantizes it for that product, and decoded;
any other has the values that bf16 has. So a recipe with all of them faked differs from the real one in how products are
rounded, and one that leaves an operand out differs from that one in it alone. Decoded values are rounded to the dtype
that products are computed in: to bf16 by up to 2^-9 of each, where e4m3 itself rounds by up to 2^-4; to fp32 not at
all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, Operand

NEITHER = False, False


class Faked(NamedTuple):
    """Of each product, whether its (left, right) operand has the values of its FP8 copy."""

    output: tuple[bool, bool] = (True, True)
    grad_input: tuple[bool, bool] = (True, True)
    grad_weight: tuple[bool, bool] = (True, True)


ABLATIONS = {
    "fp8_faked": Faked(),
    "fp8_faked_but_weights": Faked(output=(True, False), grad_input=(True, False)),
    "fp8_faked_but_activations": Faked(output=(False, True), grad_weight=(True, False)),
    "fp8_faked_but_gradients": Faked(grad_input=(False, True), grad_weight=(False, True)),
    "fp8_faked_output": Faked(grad_input=NEITHER, grad_weight=NEITHER),
    "fp8_faked_grad_input": Faked(output=NEITHER, grad_weight=NEITHER),
    "fp8_faked_grad_weight": Faked(output=NEITHER, grad_input=NEITHER),
}


class AblatedLinear(nn.Linear):
    """A linear layer whose products take what `faked` says; Parameters and their names are those of `nn.Linear`."""

    faked: Faked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., K], multiplied in autocast's dtype where that is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = _Products.apply(x.flatten(0, -2), self.weight, self.faked).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)


def ablate(model: nn.Module, faked: Faked, wanted: Callable[[nn.Module, str], bool]) -> int:
    """Make the linear layers of `model` that `wanted` accepts `AblatedLinear`, in place; how many."""
    count = 0
    for fqn, module in model.named_modules():
        if type(module) is nn.Linear and wanted(module, fqn):
            module.__class__, module.faked = AblatedLinear, faked
            count += 1
    return count


def restore(model: nn.Module) -> None:
    """Make all `AblatedLinear` of `model` `nn.Linear` again, in place."""
    for module in model.modules():
        if isinstance(module, AblatedLinear):
            del module.faked
            module.__class__ = nn.Linear


class _Products(torch.autograd.Function):
    """x [T, K] · weight [N, K]ᵀ = [T, N], of x's dtype, as are all operands."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, faked: Faked) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.faked = faked
        left, right = faked.output
        return _along_rows(x, left) @ _square(weight, x.dtype, right).mT

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        left, right = ctx.faked.grad_input
        grad_x = _along_rows(dy, left) @ _square(weight, x.dtype, right)
        left, right = ctx.faked.grad_weight
        grad_weight = _along_columns(dy, left) @ _along_columns(x, right).mT
        return grad_x, grad_weight.to(weight.dtype), None


def _along_rows(x: torch.Tensor, faked: bool) -> torch.Tensor:
    """x [T, K], with blocks along K where it is faked."""
    return _decoded(ops.quantize(x, FP8_1X128).rowwise, x.dtype) if faked else x


def _along_columns(x: torch.Tensor, faked: bool) -> torch.Tensor:
    """x [T, K] as [K, T], with blocks along T where it is faked."""
    if not faked:
        return x.mT
    return _decoded(ops.quantize(x, FP8_1X128, rowwise=False, columnwise=True).columnwise, x.dtype)


def _square(weight: torch.Tensor, dtype: torch.dtype, faked: bool) -> torch.Tensor:
    """The weight in `dtype`, in square blocks where it is faked: of its own values, as the recipe takes them."""
    return _decoded(ops.quantize(weight, FP8_128X128).rowwise, dtype) if faked else weight.to(dtype)


def _decoded(x: Operand, dtype: torch.dtype) -> torch.Tensor:
    """`ops.dequantize` in operations that a compiler fuses.

    Scales are read by index: inductor's code for a repeated and cut grid of transposed scales read others (2.13).
    """
    rows, columns = (
        torch.arange(n, device=x.qdata.device) // block for n, block in zip(x.qdata.shape, x.format.block, strict=True)
    )
    grid = x.scale.mT if x.format.transposed_scales else x.scale
    return (x.qdata.float() * grid[rows[:, None], columns]).to(dtype)
