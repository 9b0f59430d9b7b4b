"""The linear layer: `output`, `grad_input` and `grad_weight` in low precision, as one autograd function.

    forward    x → rowwise [T, K] (· wᵀ = output), and columnwise [K, T], saved
    backward   dy → rowwise [T, N] (· w columnwise = grad_input), and columnwise [N, T] (· x columnwise = grad_weight)

Every operand is quantised for the contraction it takes part in; activations and gradients are read once each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, Copies
from torchao_blockwise.nn import steps
from torchao_blockwise.nn.sharded_linear import WHOLE, AmaxGroups, sharded_linear
from torchao_blockwise.nn.weight_product import weight_gradient, weight_product
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    TrainingConfig,
)
from torchao_blockwise.tensors.weight_operands import amax_over

# What layers here take for a weight.
WEIGHTS = (MasterWeightTensor, BlockwiseFP8Tensor, NVFP4Tensor)
_DEFAULT_CONFIGS: dict[type, TrainingConfig] = {
    BlockwiseFP8Tensor: BlockwiseFP8TrainingConfig(master_weights=False),
    NVFP4Tensor: NVFP4TrainingConfig(master_weights=False),
}


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


def _linear_of_one(x, weight, bias, like, amax_groups):
    """`linear` of one device; tensors may be parts of others. `like`: the weight or what it was detached from."""
    # Else each shape, dtype and device that is read of a weight goes through Python, 10 µs a call in all.
    with _compat.no_torch_function():
        if x.is_floating_point():
            x = x.to(steps.compute_dtype(x))
        check_linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, config_of(like), amax_groups)


def is_low_precision(weight) -> bool:
    """Whether `linear` computes with this weight: one of ours, or a DTensor around one."""
    return isinstance(weight, WEIGHTS) or isinstance(_compat.local_of(weight), WEIGHTS)


def config_of(weight) -> TrainingConfig:
    """The config that a layer with this weight trains by."""
    return weight.config if weight.config is not None else _DEFAULT_CONFIGS[type(weight)]


def check_linear(x, weight, bias) -> None:
    """Raise TypeError or ValueError for operands of one device that no linear layer can take."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"linear: x must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
    if weight.dim() != 2:
        raise ValueError(f"linear: weight must be [N, K], got shape {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        got = f"{list(x.shape)} and {list(weight.shape)}"
        raise ValueError(f"linear: x [.., K] and weight [N, K] must agree in K, got {got}")
    if x.device != weight.device:
        raise ValueError(f"linear: x is on {x.device}, weight on {weight.device}; move one of them")
    # Not by the format: of a weight that comes out of a function compilers know its attributes alone.
    if isinstance(weight, NVFP4Tensor) and weight.block_size[0] != weight.block_size[1]:
        raise ValueError(
            f"linear: a weight with blocks of {weight.block_size} cannot be transposed for grad_input; "
            "make it with block_size=(16, 16)"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: bias must be [N] = [{weight.shape[0]}], got shape {list(bias.shape)}")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, config, amax_groups):
        fmt = config.activation_format
        x2d = steps.as_rows(x)
        needs_grad_weight = ctx.needs_input_grad[1]
        save_quantized = needs_grad_weight and config.saves_quantized_activations
        options = fmt, config.power_of_2_scales, ops.casting_backend(config.backend)
        rowwise, columnwise = _quantize(x2d, options, True, save_quantized, amax_groups.x)
        out = weight_product(
            rowwise,
            weight,
            config,
            columnwise=False,
            out_dtype=config.out_dtype or x.dtype,
            bias=bias,
            amax_groups=amax_groups.weight,
        )
        # The columnwise copy (qdata, scale, global_scale), or the input itself, or nothing.
        saved_x = columnwise.tensors if save_quantized else (x2d if needs_grad_weight else None, None, None)
        steps.save_for_backward(ctx, (weight,), *saved_x)
        ctx.config, ctx.save_quantized, ctx.amax_groups = config, save_quantized, amax_groups
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return steps.as_shape_of(out, x)

    @staticmethod
    def backward(ctx, grad_output):
        # A constant grad_output would leave the second gradient out in silence, so this does not wait for one.
        steps.refuse_second_order("linear")
        config = ctx.config
        weight, *saved_x = steps.take_saved(ctx)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dy = steps.as_rows(grad_output)
        grad_x = grad_weight = grad_bias = None
        groups, fmt = ctx.amax_groups, config.activation_format
        options = fmt, config.power_of_2_scales, ops.casting_backend(config.backend)
        if needs_x or needs_weight:
            dy_rowwise, dy_columnwise = _quantize(dy, options, needs_x, needs_weight, groups.grad_output)
        for product in _products_of_least_memory(dy, groups):
            if product == "grad_input" and needs_x:
                grad_x = weight_product(
                    dy_rowwise, weight, config, columnwise=True, out_dtype=ctx.x_dtype, amax_groups=groups.weight
                )
                grad_x = grad_x.view(ctx.x_shape)
                del dy_rowwise
            if product == "grad_weight" and needs_weight:
                if ctx.save_quantized:
                    x_columnwise = steps.operand_of(saved_x, config)
                else:
                    x_columnwise = _quantize(saved_x[0], options, False, True, groups.x).columnwise
                grad_weight = weight_gradient(dy_columnwise, x_columnwise, weight, config, ctx.weight_dtype)
                del dy_columnwise, x_columnwise, saved_x
        if needs_bias:
            grad_bias = steps.grad_bias(dy, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _quantize(x: torch.Tensor, options: tuple, rowwise: bool, columnwise: bool, amax_groups: str) -> Copies:
    """Copies of x [T, K]. options: (format, power_of_2_scales, backend). amax_groups: as `amax_over` takes them."""
    fmt, power_of_2_scales, backend = options
    return ops.quantize(
        x,
        fmt,
        rowwise=rowwise,
        columnwise=columnwise,
        power_of_2_scales=power_of_2_scales,
        tensor_amax=amax_over(x, amax_groups),
        padded=True,
        backend=backend,
    )


def _products_of_least_memory(dy: torch.Tensor, groups: AmaxGroups) -> tuple[str, str]:
    """The products of backward in the order in which less lives at once.

    With grad_input first its result is there beside copies of all tokens, those of dy and the saved one of x; with
    grad_weight first that is there beside the columnwise copy of the weight: up to 23 % of a layer's peak with many
    tokens (32768 of 4096 → 14336), up to 10 % the other way with few. A compiled graph has one order for any
    number of tokens, and so have ranks that ask each other for amaxes, whose parts may differ in size.
    """
    tokens, features = dy.shape
    if not torch.compiler.is_compiling() and groups == WHOLE and tokens > features:
        return "grad_weight", "grad_input"
    return "grad_input", "grad_weight"


@MasterWeightTensor.implements_torch_function(F.linear)
@BlockwiseFP8Tensor.implements_torch_function(F.linear)
@NVFP4Tensor.implements_torch_function(F.linear)
def _linear_function(func, types, args, kwargs):
    return _linear(*args, **(kwargs or {}))


def _linear(input, weight, bias=None):
    """`linear` under the argument names of `F.linear`, refusing a quantised input."""
    if not isinstance(weight, WEIGHTS):
        raise TypeError(f"linear: x is a {type(input).__name__}, weight a plain tensor; quantised tensors are weights")
    return linear(input, weight, bias)
