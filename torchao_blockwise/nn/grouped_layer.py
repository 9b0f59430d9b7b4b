"""The grouped linear layer of experts: three products in low precision for all experts, as one autograd function.

Tokens lie sorted by expert, and where each expert's end is known on the device alone. Blocks of the columnwise copies
run along tokens and start where an expert's tokens do. Tokens after the last group count as zeros. Experts stored as
[E, K, N] need no other copies: blocks are square, so rowwise and columnwise are exchanged. NVFP4's tensor scale is that
of all experts of a weight: one amax, and one reduction where ranks share it.
"""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Draws, Operand
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.contraction import gradients, quantize, quantized_output
from torchao_blockwise.nn.observation import seen
from torchao_blockwise.nn.weight_products import Contraction
from torchao_blockwise.nn.weights import WEIGHTS, check_square_blocks, config_of, rounding_key_of
from torchao_blockwise.ops.operands import check_dtype
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    TransposedWeight,
)


def grouped_linear(
    x: torch.Tensor,
    weight: MasterWeightTensor | BlockwiseFP8Tensor | NVFP4Tensor,
    group_ends: torch.Tensor,
) -> torch.Tensor:
    """out[m] = x[m] @ weight[g].T for the rows m of each group g; three products in the weight's low precision.

    x: [M, K] bf16 | f16 | f32, sorted by expert. weight: [E, N, K], one of ours.
    group_ends: [E] int32, cumulative, on the device of x: group g is rows [group_ends[g-1], group_ends[g]). Any sizes,
        which are never read by the host: see `ops.grouped_matmul`.
    Returns [M, N] of config.out_dtype, else of autocast's dtype, else of x's; rows after the last group are zeros, as
    are their gradients and those of experts without tokens. Gradients: x's dtype, the weight's. `F.grouped_mm(x,
    weight.transpose(-2, -1), offs=group_ends)` comes here by itself, also on a weight stored as [E, K, N]. A bias is
    added by the caller, by row.
    A weight with an attribute `main_grad` [E, N, K] f32 has its gradient added there and not to `.grad`; in eager mode.
    Raises TypeError for a dtype or another weight, ValueError for shapes, devices, group ends, or a weight whose blocks
    cannot be transposed.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """
    if not isinstance(weight, WEIGHTS):
        raise TypeError(
            f"grouped_linear: weight must be a MasterWeightTensor or a quantized tensor, got {type(weight).__name__}; "
            "wrap or quantize it, or call torch.nn.functional.grouped_mm"
        )
    return _grouped_linear(x, weight, group_ends, True, None)


def _grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_ends: torch.Tensor,
    contracts_columns: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """contracts_columns: whether K, the contraction of `output`, is the last dim in which the weight is stored."""
    with _compat.no_torch_function():
        x = steps.cast_for_compute(x)
        _check(x, weight, contracts_columns and not isinstance(weight, TransposedWeight))
        key = rounding_key_of(_stored(weight))
        return steps.apply(_GroupedLinear, x, weight, group_ends, contracts_columns, out_dtype, key)


def _check(x: torch.Tensor, weight: torch.Tensor, contracts_columns: bool) -> None:
    """contracts_columns: whether K is the last dim of the shape that `weight` reports."""
    check_dtype("grouped_linear", x)
    if weight.dim() != 3:
        raise ValueError(f"grouped_linear: weight must be [E, N, K], got shape {list(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[2 if contracts_columns else 1]:
        named = "[E, N, K]" if contracts_columns else "[E, K, N]"
        got = f"{list(x.shape)} and {list(weight.shape)}"
        raise ValueError(f"grouped_linear: x [M, K] and weight {named} must agree in K, got {got}")
    if x.device != weight.device:
        raise ValueError(f"grouped_linear: x is on {x.device}, weight on {weight.device}; move one of them")
    check_square_blocks("grouped_linear", "a weight", _stored(weight))


def _stored(weight: torch.Tensor) -> torch.Tensor:
    """The weight as it lies in memory."""
    return weight.weight if isinstance(weight, TransposedWeight) else weight


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        group_ends: torch.Tensor,
        contracts_columns: bool,
        out_dtype: torch.dtype,
        rounding_key: torch.Tensor | None,
    ) -> torch.Tensor:
        stored = _stored(weight)
        config, hp, rounded_to = config_of(stored), stored, None
        if isinstance(stored, MasterWeightTensor):
            # Of a cast copy the weight that it was made of, so that the cast one can go.
            hp, rounded_to = stored.source
            if rounded_to is not None:
                layer, stored = stored.layer, MasterWeightTensor(hp, stored.config)
                stored.layer = layer
        needs_weight = ctx.needs_input_grad[1]
        save_quantized = needs_weight and config.saves_quantized_activations
        groups = steps.groups_of(group_ends, x.shape[0], config)
        assert groups is not None
        how = Contraction(config, groups, rounded_to=rounded_to, transposed=not contracts_columns)
        dtype = out_dtype or config.out_dtype or x.dtype
        out, columnwise = steps.named(_forward, stored, x, how, dtype, save_quantized)
        saved_x = columnwise.tensors if save_quantized else (x,) if needs_weight else ()
        saved_weight = stored if rounded_to is None else hp
        steps.save_for_backward(ctx, (saved_weight,), *groups, rounding_key, *saved_x)
        ctx.config, ctx.rounded_to, ctx.contracts_columns = config, rounded_to, contracts_columns
        ctx.dtypes, ctx.is_transposed = (x.dtype, weight.dtype), isinstance(weight, TransposedWeight)
        ctx.seen = seen(stored, x, how)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        steps.refuse_second_order("grouped_linear")
        if ctx.seen is not None:
            ctx.seen(grad_output)
        config, rounded_to = ctx.config, ctx.rounded_to
        weight, group_ends, tables, rounding_key, saved_x = steps.take_saved(ctx, 4)
        groups = steps.saved_groups(group_ends, tables)
        how = Contraction(config, groups, rounded_to=rounded_to, transposed=not ctx.contracts_columns)
        weight = weight if rounded_to is None else MasterWeightTensor(weight, config)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        draws = ops.draws_for(rounding_key, grad_output) if needs_x or needs_weight else None
        args = saved_x, how, (needs_x, needs_weight), ctx.dtypes, draws
        grad_x, grad_weight = steps.named(_backward, weight, grad_output, *args)
        if grad_weight is not None and ctx.is_transposed:
            grad_weight = grad_weight.transpose(-2, -1)
        return grad_x, grad_weight, None, None, None, None


def _forward(
    weight: torch.Tensor, x: torch.Tensor, how: Contraction, dtype: torch.dtype, save_quantized: bool
) -> tuple[torch.Tensor, Operand | None]:
    """(x · wᵀ, the columnwise copy of x or None)."""
    return quantized_output(x, weight, how, dtype, columnwise=save_quantized)


def _backward(
    weight: torch.Tensor,
    grad_output: torch.Tensor,
    saved_x: list[Any],
    how: Contraction,
    needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    draws: Draws | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(grad_input, grad_weight), those that are needed."""

    def anew(x: torch.Tensor) -> Operand:
        return quantize(x, how, rowwise=False, columnwise=True).columnwise

    dy = [*quantize(grad_output, how, rowwise=needs[0], columnwise=needs[1], draws=draws)]
    x_columnwise = steps.columnwise_of(saved_x, how.config, anew)
    return gradients(dy, x_columnwise, grad_output.shape[0], weight, how, dtypes, weight_first=False)


def _take(functions: list[Any]) -> None:
    """Have the grouped products `functions` of our weights computed here."""
    for kind in (*WEIGHTS, TransposedWeight):
        kind.implements_torch_function(functions)(_grouped_mm_function)


def take_products_of_others() -> None:
    """Compute the grouped products of libraries in use here; called where experts are converted.

    Else transformers, which compiles weights in float32 by an operation of its own, would compute in high precision.
    """
    _take(_compat.grouped_products_of_others())


def _grouped_mm_function(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return _grouped_mm(*args, **(kwargs or {}))


def _grouped_mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`F.grouped_mm` of tokens [M, K] and experts [E, K, N] of ours, transposed or stored so."""
    if not isinstance(mat2, (*WEIGHTS, TransposedWeight)):
        raise TypeError(
            f"grouped_mm: x is a {type(input).__name__}, the weight a plain tensor; quantized tensors are weights"
        )
    if input.dim() != 2 or mat2.dim() != 3 or offs is None:
        got = f"{list(input.shape)}, {list(mat2.shape)} {'without' if offs is None else 'and'} offs"
        raise NotImplementedError(
            f"grouped_mm: low precision takes tokens [M, K], experts [E, K, N] and offs [E], got {got}; flatten tokens "
            "that are batched by expert, and pass where each expert's end"
        )
    if bias is not None:
        raise NotImplementedError("grouped_mm: PyTorch adds no bias in it either; add it to the output, by row")
    return _grouped_linear(input, mat2, offs, isinstance(mat2, TransposedWeight), out_dtype)


_take([_compat.grouped_mm])
