"""What layers share that quantise an activation as they compute it: which weights allow it, and steps of backward."""

from __future__ import annotations

import torch

from torchao_blockwise import ops
from torchao_blockwise.nn.linear import WEIGHTS, config_of
from torchao_blockwise.nn.weight_product import weight_gradient, weight_product
from torchao_blockwise.ops.backend import may_have_kernels
from torchao_blockwise.tensors import BlockwiseFP8Tensor, BlockwiseFP8TrainingConfig, MasterWeightTensor


def is_quantized_weight(weight) -> bool:
    """Whether `weight` trains in low precision and is no part of another, as a DTensor is."""
    return isinstance(weight, WEIGHTS)


def is_fp8_weight(weight) -> bool:
    """Whether `weight` trains in blockwise FP8; NVFP4 needs the amax of a whole tensor to quantise any of it."""
    if not isinstance(weight, (MasterWeightTensor, BlockwiseFP8Tensor)):
        return False
    return isinstance(config_of(weight), BlockwiseFP8TrainingConfig)


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether none is a tensor subclass, such as a shard of a parallel run, which operations here know nothing of."""
    return all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)


def options_of(config) -> dict:
    """How operations that quantise do it for a layer of this config."""
    backend = ops.casting_backend(config.backend)
    return {"power_of_2_scales": config.power_of_2_scales, "padded": True, "backend": backend}


def quantized(quantize, *args, rowwise: bool, columnwise: bool, **options):
    """(rowwise or None, columnwise or None) of an operation that returns one operand, or both."""
    if not (rowwise or columnwise):
        return None, None
    result = quantize(*args, rowwise=rowwise, columnwise=columnwise, **options)
    if rowwise and columnwise:
        return result
    return (result, None) if rowwise else (None, result)


def group_tables(group_ends: torch.Tensor | None, tokens: int, *configs) -> torch.Tensor | None:
    """Tables for all operations of a layer of these configs on `tokens` tokens in these groups, forward and backward.

    None where operations need none, or make their own because configs differ in format or backend.
    """
    if group_ends is None or not may_have_kernels(group_ends.device):
        return None
    wanted, *others = ((config.activation_format, ops.casting_backend(config.backend)) for config in configs)
    fmt, backend = wanted
    if backend is ops.Backend.REFERENCE or any(other != wanted for other in others):
        return None
    return ops.group_tables(group_ends, tokens, fmt, backend=backend)


def quantized_tokens(
    x,
    config,
    *,
    rowwise: bool,
    columnwise: bool,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
):
    """(rowwise or None, columnwise or None) of x [T, K]; group_ends: of experts, by whom the rows are sorted."""
    options = {"rowwise": rowwise, "columnwise": columnwise, **options_of(config)}
    if group_ends is None:
        return quantized(ops.quantize, x, config.activation_format, **options)
    # Each group is padded anyway.
    del options["padded"]
    options["group_tables"] = group_tables
    return quantized(ops.grouped_quantize, x, group_ends, config.activation_format, **options)


def fields(columnwise) -> tuple:
    """An operand as tensors to save for backward; nothing in the place of each where there is none."""
    return tuple(columnwise) if columnwise is not None else (None, None, None)


def grad_input(dy_rowwise, weight, config, dtype: torch.dtype, **groups) -> torch.Tensor:
    """dy · w; groups: of experts and of ranks, as in `weight_product`."""
    return weight_product(dy_rowwise, weight, config, columnwise=True, out_dtype=dtype, **groups)


def grad_weight(dy_columnwise, x_columnwise, weight, config, **groups) -> torch.Tensor | None:
    """dyᵀ · x, both quantised along tokens, or None: see `weight_gradient`."""
    return weight_gradient(dy_columnwise, x_columnwise, weight, config, weight.dtype, **groups)
