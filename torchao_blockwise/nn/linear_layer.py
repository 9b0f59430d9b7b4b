"""The linear layer: `output`, `grad_input` and `grad_weight` in low precision, as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import Draws, Operand, Place
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.contraction import (
    gradients,
    quantize,
    quantized_output,
    weight_comes_first,
)
from torchao_blockwise.nn.observation import seen
from torchao_blockwise.nn.sharded_linear import WHOLE, AmaxGroups, sharded_linear
from torchao_blockwise.nn.weight_products import Contraction, Readable
from torchao_blockwise.nn.weights import WEIGHTS, check_linear, config_of, rounding_key_of
from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, TrainingConfig


def linear(
    x: torch.Tensor,
    weight: MasterWeightTensor | BlockwiseFP8Tensor | NVFP4Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias with `output`, `grad_input` and `grad_weight` in the weight's low precision.

    x: [.., K] bf16 | f16 | f32. weight: [N, K]. bias: [N] or None. All three may be DTensors; see `nn.sharded_linear`.
    Returns [.., N] of config.out_dtype, else of autocast's dtype, else of x's. Gradients: x's dtype, the weight's, the
    bias's. Any number of tokens, 0 included; any N and K. `F.linear` and `nn.Linear` come here by themselves.
    A weight with an attribute `main_grad` [N, K] f32 has its gradient added there and not to `.grad`; in eager mode.
    Raises TypeError for a dtype, ValueError for shapes, devices or a weight whose blocks cannot be transposed.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """
    if not isinstance(weight, WEIGHTS):
        return sharded_linear(_linear_of_one, x, weight, bias)
    return _linear_of_one(x, weight, bias, weight, WHOLE)


def _linear_of_one(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    like: torch.Tensor,
    split: AmaxGroups,
    places: tuple[Place, Place] | None = None,
) -> torch.Tensor:
    """`linear` of one device; tensors may be parts of others.

    like: the weight or what it was detached from. places: of the copies of the output's gradient in the whole's.
    """
    # Else each shape, dtype and device that is read of a weight goes through Python, 10 µs a call in all.
    with _compat.no_torch_function():
        x = steps.cast_for_compute(x)
        check_linear(x, weight, bias)
        return steps.apply(_Linear, x, weight, bias, config_of(like), split, rounding_key_of(like), places)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        config: TrainingConfig,
        split: AmaxGroups,
        rounding_key: torch.Tensor | None,
        places: tuple[Place, Place] | None,
    ) -> torch.Tensor:
        how = Contraction(config, split=split)
        needs_weight = ctx.needs_input_grad[1]
        save_quantized = needs_weight and config.saves_quantized_activations
        out, columnwise = steps.named(_forward, weight, x, bias, how, save_quantized)
        # The columnwise copy (qdata, scale, global_scale), or the input itself, or nothing.
        saved_x = columnwise.tensors if save_quantized else (x,) if needs_weight else ()
        steps.save_for_backward(ctx, (weight,), rounding_key, *saved_x)
        ctx.how, ctx.x_shape, ctx.dtypes = how, x.shape, (x.dtype, weight.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.places, ctx.seen = places, seen(weight, x, how)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        return *linear_gradients(ctx, grad_output), None, None, None, None


def linear_gradients(
    ctx: Any, grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(grad of x, of weight, of bias) from what a forward pass of `linear` left in `ctx`."""
    # A constant grad_output would leave the second gradient out in silence, so this does not wait for one.
    steps.refuse_second_order("linear")
    weight, rounding_key, saved_x = steps.take_saved(ctx, 2)
    if ctx.seen is not None:
        ctx.seen(steps.as_rows(grad_output))
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    draws = ops.draws_for(rounding_key, grad_output, ctx.places) if needs_x or needs_weight else None
    args = saved_x, ctx.how, (needs_x, needs_weight), ctx.x_shape, ctx.dtypes, draws
    grads = steps.named(_backward, weight, grad_output, *args)
    grad_bias = steps.grad_bias(steps.as_rows(grad_output), ctx.bias_dtype) if needs_bias else None
    return *grads, grad_bias


def _forward(
    weight: Readable, x: torch.Tensor, bias: torch.Tensor | None, how: Contraction, save_quantized: bool
) -> tuple[torch.Tensor, Operand | None]:
    """(x · wᵀ + bias, the columnwise copy of x or None)."""
    dtype = how.config.out_dtype or x.dtype
    out, columnwise = quantized_output(steps.as_rows(x), weight, how, dtype, bias, columnwise=save_quantized)
    return steps.as_shape_of(out, x), columnwise


def _backward(
    weight: Readable,
    grad_output: torch.Tensor,
    saved_x: list[Any],
    how: Contraction,
    needs: tuple[bool, ...],
    x_shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype],
    draws: Draws | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(grad_input, grad_weight), those that are needed."""
    needs_x, needs_weight = needs
    dy = steps.as_rows(grad_output)

    def anew(x: torch.Tensor) -> Operand:
        return quantize(steps.as_rows(x), how, rowwise=False, columnwise=True, over=how.split.x).columnwise

    grad_x, grad_weight = gradients(
        [*quantize(dy, how, rowwise=needs_x, columnwise=needs_weight, over=how.split.grad_output, draws=draws)],
        steps.columnwise_of(saved_x, how.config, anew),
        dy.shape[0],
        weight,
        how,
        dtypes,
        weight_first=weight_comes_first(dy, how),
    )
    if grad_x is not None and grad_x.shape != x_shape:
        grad_x = grad_x.view(x_shape)
    return grad_x, grad_weight


@MasterWeightTensor.implements_torch_function(F.linear)
@BlockwiseFP8Tensor.implements_torch_function(F.linear)
@NVFP4Tensor.implements_torch_function(F.linear)
def _linear_function(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`linear` for `F.linear`, refusing a quantized input."""
    x, weight, bias = _by_names_of_torch(*args, **(kwargs or {}))
    if not isinstance(weight, WEIGHTS):
        raise TypeError(f"linear: x is a {type(x).__name__}, weight a plain tensor; quantized tensors are weights")
    return _linear_of_one(x, weight, bias, weight, WHOLE)


def _by_names_of_torch(input: Any, weight: Any, bias: torch.Tensor | None = None) -> tuple[Any, Any, Any]:
    return input, weight, bias
