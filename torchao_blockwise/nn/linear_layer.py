"""The linear layer: `output`, `grad_input` and `grad_weight` in low precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat
from torchao_blockwise.formats import Place
from torchao_blockwise.nn.activations import Input
from torchao_blockwise.nn.gemms import WHOLE, AmaxGroups, GemmSpec
from torchao_blockwise.nn.layer import Layer, cast_for_compute
from torchao_blockwise.nn.sharded_linear import sharded_linear
from torchao_blockwise.nn.weights import WEIGHTS, check_linear, config_of, rounding_key_of
from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor


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
        return sharded_linear(local_linear, x, weight, bias)
    return local_linear(x, weight, bias, weight)


def local_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    like: torch.Tensor,
    amax_groups: AmaxGroups = WHOLE,
    places: tuple[Place, Place] | None = None,
) -> torch.Tensor:
    """`linear` of one device; tensors may be parts of others.

    like: the weight or what it was detached from. places: of the copies of the output's gradient in the whole's.
    """
    # Else each shape, dtype and device that is read of a weight goes through Python, 10 µs a call in all.
    with _compat.no_torch_function():
        x = cast_for_compute(x)
        check_linear(x, weight, bias)
        config = config_of(like)
        spec = GemmSpec(None, config, x.dtype, config.out_dtype or x.dtype, amax_groups=amax_groups, places=places)
        key = rounding_key_of(like) if config.stochastic_rounding else None
        return Layer.apply("linear", Input, spec, weight, bias, key, None, None, torch.is_grad_enabled(), x)


@MasterWeightTensor.implements_torch_function(F.linear)
@BlockwiseFP8Tensor.implements_torch_function(F.linear)
@NVFP4Tensor.implements_torch_function(F.linear)
def _linear_function(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`linear` for `F.linear`, refusing a quantized input."""
    x, weight, bias = _by_names_of_torch(*args, **(kwargs or {}))
    if not isinstance(weight, WEIGHTS):
        raise TypeError(f"linear: x is a {type(x).__name__}, weight a plain tensor; quantized tensors are weights")
    return local_linear(x, weight, bias, weight)


def _by_names_of_torch(input: Any, weight: Any, bias: torch.Tensor | None = None) -> tuple[Any, Any, Any]:
    return input, weight, bias
