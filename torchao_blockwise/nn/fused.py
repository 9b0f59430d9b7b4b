"""What layers share that quantize an activation as they compute it: which weights allow it, and steps of backward."""

from __future__ import annotations

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import CastOptions, Copies, Groups
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


def cast_options(config, rowwise: bool, columnwise: bool) -> CastOptions:
    """How a layer of this config quantizes an activation or its gradient."""
    return CastOptions(config.activation_format, rowwise, columnwise, config.power_of_2_scales, padded=True)


def quantized(x, config, *, rowwise: bool, columnwise: bool, groups: Groups | None = None) -> Copies:
    """Copies of x [T, K], none where none are asked for; groups: of experts, by whom the rows are sorted."""
    if not (rowwise or columnwise):
        return Copies(None, None)
    options = cast_options(config, rowwise, columnwise)
    return ops.quantize_by(x, options, groups, backend=ops.casting_backend(config.backend))


def groups_of(group_ends: torch.Tensor | None, tokens: int, *configs) -> Groups | None:
    """The groups of so many tokens, with tables for all operations of a layer of these configs, forward and backward.

    Without tables where operations need none, or make their own because configs differ in format or backend.
    """
    if group_ends is None:
        return None
    wanted, *others = ((config.activation_format, ops.casting_backend(config.backend)) for config in configs)
    fmt, backend = wanted
    needs_none = backend is ops.Backend.REFERENCE or not may_have_kernels(group_ends.device)
    if needs_none or any(other != wanted for other in others):
        return Groups(group_ends)
    return ops.make_groups(group_ends, tokens, fmt, backend=backend)


def saved_groups(group_ends: torch.Tensor | None, tables: torch.Tensor | None) -> Groups | None:
    """Groups from what was saved of them for backward."""
    return None if group_ends is None else Groups(group_ends, tables)


def grad_input(dy_rowwise, weight, config, dtype: torch.dtype, **groups) -> torch.Tensor:
    """dy · w; groups: of experts and of ranks, as in `weight_product`."""
    return weight_product(dy_rowwise, weight, config, columnwise=True, out_dtype=dtype, **groups)


def grad_weight(dy_columnwise, x_columnwise, weight, config, **groups) -> torch.Tensor | None:
    """dyᵀ · x, both quantized along tokens, or None: see `weight_gradient`."""
    return weight_gradient(dy_columnwise, x_columnwise, weight, config, weight.dtype, **groups)
