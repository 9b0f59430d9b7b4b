"""The linear layer on shards: tensor parallelism runs a layer whose weight is a DTensor.

    weight split by rows (colwise)      x replicated            · local rows     = local columns of the output
    weight split by columns (rowwise)   local columns of x      · local columns  = a summand of the output
    weight replicated                   local or all tokens     · whole weight   = local or all tokens of the output

Every rank runs the layer on its local tensors, so the three GEMMs are the same as on one device. (DTensor itself would
decompose `F.linear` into GEMMs that do not know blocks.) Blocks have the same boundaries as on one device: a shard that
would cut a block is refused, and the scale of a whole tensor (NVFP4) uses its largest value on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import NVFP4_1X16, Place
from torchao_blockwise.nn.gemms import WHOLE, AmaxGroups
from torchao_blockwise.nn.weights import config_of, in_layer
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.weight_operands import group_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

# In formats with stochastic rounding, random bits belong to blocks of the whole gradient.
_BLOCK = NVFP4_1X16.block[1]


def sharded_linear(linear: Callable[..., Any], x: DTensor, weight: Any, bias: DTensor | None = None) -> torch.Tensor:
    """Run `linear(x, weight, bias, like, amax_groups, places)` on each rank's local part of DTensors.

    x: DTensor [.., K]; redistributed if the weight needs it. weight: DTensor [N, K] that contains a
        `MasterWeightTensor` or a quantized tensor, as Shard(0), Shard(1) or Replicate(). bias: DTensor [N] or None.
    Returns a DTensor [.., N]: split by columns for Shard(0), Partial() for Shard(1), and otherwise with the placements
    of x. Gradients have the placements of the weight and the bias; that of a replicated weight is Partial() if tokens
    are split.
    Raises TypeError for operands that are not all DTensors, ValueError for placements or shards that cut blocks.
    """
    _check(x, weight, bias)
    mesh = weight.device_mesh
    plan = [_Plan.of(*placements, x.dim()) for placements in zip(x.placements, weight.placements)]
    wanted = [step.x for step in plan]
    if tuple(wanted) != tuple(x.placements):
        x = x.redistribute(placements=wanted)
    local_weight = _LocalWeight.apply(weight, [step.grad_weight for step in plan])
    local_bias: torch.Tensor | None = None
    if bias is not None:
        wanted = [step.bias for step in plan]
        bias = bias if tuple(wanted) == tuple(bias.placements) else bias.redistribute(placements=wanted)
        local_bias = bias.to_local(grad_placements=tuple(step.grad_bias for step in plan))
        summands = [rank for rank, step in zip(mesh.get_coordinate(), plan) if step.output.is_partial()]
        if any(summands):
            # Only the first summand includes the bias. For the others it is zero, with the same gradient.
            local_bias = local_bias - local_bias.detach()
    shape = torch.Size([*x.shape[:-1], weight.shape[0]])
    local_x = x.to_local(grad_placements=tuple(step.grad_x for step in plan))
    # Compilers know the config of a weight that is an input, but not of one that a function returns.
    like, placements = _compat.local_of(weight), [step.output for step in plan]
    places = places_of(shape, mesh, placements) if config_of(like).stochastic_rounding else None
    out = linear(local_x, local_weight, local_bias, like, _amax_groups(weight, plan), places)
    return contiguous_dtensor(out, mesh, placements, shape)


def _why_shards_cut_blocks(weight: Any) -> str | None:
    """Return which blocks the shards of `weight`, a DTensor [N, K], cut, with the fix, or None if they cut none."""
    local: Any = _compat.local_of(weight)
    block = local.fmt.block
    for dim, what in enumerate(("rows", "columns")):
        size, ranks = weight.shape[dim], 1
        for i, placement in enumerate(weight.placements):
            ranks *= weight.device_mesh.size(i) if placement.is_shard(dim) else 1
        if ranks > 1 and -(-size // ranks) % block[dim]:
            fitting = [str(n) for n in range(2, size // block[dim] + 1) if -(-size // n) % block[dim] == 0]
            return (
                f"{size} {what} over {ranks} ranks give {-(-size // ranks)}, which cuts a block of {block[dim]}; "
                f"use {' or '.join(['1', *fitting])} rank{'s' * bool(fitting)}, or exclude the layer (filter_fn)"
            )
    return None


def _check(x: DTensor, weight: Any, bias: DTensor | None) -> None:
    from torch.distributed.tensor import DTensor

    local = _compat.local_of(weight) if isinstance(weight, DTensor) else weight
    if not isinstance(local, (MasterWeightTensor, QuantizedTensor)):
        raise TypeError(
            f"linear: weight must be a MasterWeightTensor or a quantized tensor, got {type(local).__name__}; "
            "wrap or quantize it, or call torch.nn.functional.linear"
        )
    for name, operand in (("x", x), ("bias", bias)):
        if operand is not None and not isinstance(operand, DTensor):
            raise TypeError(
                f"linear: the weight is a DTensor, but {name} is a {type(operand).__name__}; parallelize the layer "
                "with ColwiseParallel or RowwiseParallel, or use DTensor.from_local"
            )
    if x.device_mesh != weight.device_mesh:
        raise ValueError(f"linear: x is on {x.device_mesh}, but weight is on {weight.device_mesh}; redistribute x")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        got = f"{list(x.shape)} and {list(weight.shape)}"
        raise ValueError(f"linear: x [.., K] and weight [N, K] must agree in K, got {got}")
    reason = _why_shards_cut_blocks(weight)
    if reason is not None:
        raise ValueError(f"{local.layer.rpartition('.')[0] or 'linear'}: {reason}")


class _Plan(NamedTuple):
    """The DTensor placement of each tensor along one dim of the mesh."""

    x: Any
    output: Any
    bias: Any
    grad_x: Any
    grad_weight: Any
    grad_bias: Any

    @classmethod
    def of(cls, x: Placement, weight: Placement, ndim: int) -> _Plan:
        from torch.distributed.tensor import Partial, Replicate, Shard

        whole, columns = Replicate(), Shard(ndim - 1)
        if weight == Shard(0):
            return cls(whole, columns, Shard(0), Partial(), weight, Shard(0))
        if weight == Shard(1):
            return cls(columns, Partial(), whole, columns, weight, whole)
        if weight != whole:
            raise ValueError(f"linear: a weight must be placed as Shard(0), Shard(1) or Replicate(), got {weight}")
        if type(x) is Shard and x != columns:
            return cls(x, x, whole, x, Partial(), Partial())
        return cls(whole, whole, whole, whole, whole, whole)


def _amax_groups(weight: Any, plan: list[_Plan]) -> AmaxGroups:
    local: Any = _compat.local_of(weight)
    if not local.fmt.has_global_scale:
        return WHOLE
    mesh, placements = weight.device_mesh, ([p.x for p in plan], weight.placements, [p.output for p in plan])
    return AmaxGroups(*(_groups(mesh, of_tensor) for of_tensor in placements))


def _groups(mesh: DeviceMesh, placements: Sequence[Placement | None]) -> str:
    return group_names([mesh.get_group(i) for i, p in enumerate(placements) if p is not None and p.is_shard()])


def contiguous_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Return the contiguous DTensor of this shape with these local parts."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _LocalWeight(torch.autograd.Function):
    """The local part of a weight. Backward raises if the weight has changed."""

    @staticmethod
    def forward(ctx: Any, weight: Any, grad_placements: Sequence[Placement]) -> torch.Tensor:
        # Saved only for that check.
        ctx.save_for_backward(weight)
        ctx.grad_placements = grad_placements
        return weight.to_local().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        return contiguous_dtensor(grad, weight.device_mesh, ctx.grad_placements, weight.shape), None


def local_experts(name: str, weight: Any) -> tuple[torch.Tensor, str]:
    """Return (the local experts of a weight [E, .., ..], whose gradient has its placements; the groups that split it).

    There are no groups if each expert has its own tensor scale.
    Raises ValueError if experts themselves are split.
    """
    local = _compat.local_of(weight)
    if local is weight:
        return weight, ""
    placements = weight.placements
    if any(p.is_shard() and not p.is_shard(0) for p in placements):
        raise ValueError(
            f"swiglu_experts: {name} must be split by expert, got {list(weight.shape)} as {placements}"
            f"{in_layer(local)}; use distributed.ExpertParallel"
        )
    config = getattr(local, "config", None)
    per_expert = config is not None and config.scale_per_expert
    return _LocalWeight.apply(weight, placements), "" if per_expert else _groups(weight.device_mesh, placements)


# --- random bits of shards --------------------------------------------------------------------------------------------


def places_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Place, Place]:
    """Return the places of this rank's rowwise and columnwise copies in those of a gradient [.., N] of this shape.

    Raises ValueError if the rank's tokens are not consecutive, or begin inside a block of 16.
    """
    starts = starts_of(shape, mesh, placements)
    *leading, features = shape
    *outer, column = starts
    for dim, start in enumerate(outer):
        if start and math.prod(leading[:dim]) != 1:
            raise ValueError(
                f"linear: stochastic rounding needs consecutive tokens on each rank, but a gradient {list(shape)} is "
                f"split along dim {dim}; split dim 0, or flatten the tokens"
            )
    token = sum(start * math.prod(leading[dim + 1 :]) for dim, start in enumerate(outer))
    for name, start in (("token", token), ("column", column)):
        if start % _BLOCK:
            raise ValueError(
                f"linear: stochastic rounding needs shards that start at multiples of {_BLOCK}, but a shard of a "
                f"gradient {list(shape)} starts at {name} {start}; split it at multiples of {_BLOCK}"
            )
    blocks, chunks = (-(-size // _BLOCK) for size in (features, math.prod(leading)))
    return Place(0, token, column // _BLOCK, blocks), Place(1, column, token // _BLOCK, chunks)


def starts_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Return the first index of this rank's shard in each dim of a tensor of this shape, sharded like `torch.chunk`."""
    starts, sizes = [0] * len(shape), list(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank of the mesh"
    for i, placement in enumerate(placements):
        if placement.is_shard():
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]
            chunk = -(-sizes[dim] // mesh.size(i))
            first = min(coordinate[i] * chunk, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return starts
