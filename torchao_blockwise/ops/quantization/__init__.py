"""Quantize: one read of a high-precision tensor to its rowwise and columnwise copies; see ops/casting.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Place,
    global_scale_of,
)
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, why_no_encoders
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.ops.groups.quantization.reference import amax_bits as amax_bits_by_reference
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.operands import new_copies, why_no_tiles
from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.ops.randomization.reference import quantize as quantize_by_reference
from torchao_blockwise.ops.registry import OPTIONS, PLACE, Operation, groups
from torchao_blockwise.ops.sharding import Rules, Spec, shards_on_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_KERNEL_FORMATS = {fmt.name for fmt in (FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16)}


# --- copies -----------------------------------------------------------------------------------------------------------


def _why_no_kernels(x: torch.Tensor, amax_bits: object, options: CastOptions, *_: object) -> str | None:
    if options.fmt.name not in _KERNEL_FORMATS:
        return f"{options.fmt.name} has no kernel yet"
    return why_no_encoders(x)


def _check_groups(x: torch.Tensor, amax_bits: object, options: CastOptions, groups: Groups | None, *_: object) -> None:
    if groups is not None:
        check_groups("grouped_quantize", groups, x.shape[0], x.device, options.fmt.block[1])


def _fake(x: torch.Tensor, amax_bits: object, options: CastOptions, groups: Groups | None, *_: object) -> Copies:
    return new_copies(x, x.shape, options, groups)


def _copy_placements(x: Spec, fmt: BlockFormat, columnwise: bool, dim: int) -> list[Placement]:
    """Placements of (qdata, scale) where `x` is sharded on `dim`."""
    from torch.distributed.tensor import Shard

    ndim = len(x.shape)
    last, row = ndim - 1, ndim - 2
    if columnwise and dim >= row:
        dim = last if dim == row else row
    scale_dim = dim
    if fmt.transposed_scales and dim >= row:
        scale_dim = last if dim == row else row
    return [Shard(dim), Shard(scale_dim)]


def _sharding(
    x: Spec,
    amax_bits: Spec | None,
    options: CastOptions,
    groups: Groups | None,
    key: Spec | None,
    place: Place,
) -> Rules:
    """x replicated, or sharded on a dim whose shards end on block borders; without an amax NVFP4 needs all of x."""
    from torch.distributed.tensor import Replicate, Shard

    def rule(outputs: list[Placement], of_x: Placement, of_amax: Placement) -> tuple[list[Any], list[Any]]:
        of_groups = [None, None] if groups is None else [t if t is None else Replicate() for t in groups]
        of_key = None if key is None else Replicate()
        return outputs, [of_x, None if amax_bits is None else of_amax, *of_groups, of_key]

    copies = [columnwise for columnwise, asked in ((False, options.rowwise), (True, options.columnwise)) if asked]
    replicated: list[Placement] = [Replicate()]
    rules: Rules = [rule(replicated * 2 * len(copies), Replicate(), Replicate())]
    if options.hadamard or groups is not None or key is not None:
        return rules
    for dim in range(len(x.shape)):
        # A shard that is padded by itself is another one than in the whole.
        whole = not options.padded or dim != len(x.shape) - 2 or x.shape[dim] % (padded_size(1) * x.mesh.size()) == 0
        if whole and all(shards_on_blocks(x, dim, options.fmt, columnwise) for columnwise in copies):
            outputs = [p for columnwise in copies for p in _copy_placements(x, options.fmt, columnwise, dim)]
            is_of_matrices = options.scale_per_group and dim < len(x.shape) - 2
            rules.append(rule(outputs, Shard(dim), Shard(dim) if is_of_matrices else Replicate()))
    return rules


_TABLE = [
    kernels(
        Backend.GLUON,
        f"{__name__}.kernels_gluon:quantize",
        lambda x, amax_bits, options, *_: why_no_tiles(options, x),
    ),
    kernels(Backend.TRITON, "torchao_blockwise.ops.randomization.kernels_triton:quantize", _why_no_kernels),
    Implementation(Backend.REFERENCE, quantize_by_reference),
]

# x [.., M, K] -> (qdata, scale) of each copy that is asked for. amax_bits: of the tensor, of each group or matrix; None
# in formats without tensor scales. key: of random bits, None for round to nearest. A key and a transform are for one
# copy of x [M, K].
# Two operations, because DTensor rules cannot place the tensors of a list one by one; they share their table.
quantize_op, quantize_both_op = (
    Operation(
        f"{name}(Tensor x, Tensor? amax_bits, {OPTIONS}, {groups('Tensor?')}, Tensor? key, {PLACE}, str backend)"
        f" -> {returns}",
        takes=(None, None, CastOptions, Groups, None, Place),
        table=_TABLE,
        fake=_fake,
        check=_check_groups,
        sharding=_sharding,
        called="quantize",
    )
    for name, returns in (("quantize", "(Tensor, Tensor)"), ("quantize_both", "(Tensor, Tensor, Tensor, Tensor)"))
)

# --- amaxes and tensor scales -----------------------------------------------------------------------------------------


def _check_ends(x: torch.Tensor, ends: torch.Tensor | None, each: bool) -> None:
    if ends is not None:
        check_group_ends("grouped_quantize", ends, x.shape[0], x.device)


def _amax_fake(x: torch.Tensor, ends: torch.Tensor | None, each: bool) -> torch.Tensor:
    shape = () if not each else x.shape[:-2] if ends is None else ends.shape
    return x.new_empty(shape, dtype=torch.int32)


def _amax_sharding(x: Spec, ends: Spec | None, each: bool) -> Rules:
    from torch.distributed.tensor import Partial, Replicate, Shard

    rules: Rules = [([Replicate()], [Replicate(), None if ends is None else Replicate()])]
    if ends is None:
        matrices = len(x.shape) - 2 if each else 0
        rules += [
            ([Shard(dim) if dim < matrices else Partial("max")], [Shard(dim), None]) for dim in range(len(x.shape))
        ]
    return rules


# The amax of x, or of its rows in groups; each: of every group, or of every matrix of x [.., M, K]. Bits, because a MAX
# over ranks loses a NaN among floats; as integers magnitudes keep their order, NaN above all.
tensor_amax_bits_op = Operation(
    "tensor_amax_bits(Tensor x, Tensor? group_ends, bool each, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_amax:tensor_amax_bits"),
        Implementation(Backend.REFERENCE, amax_bits_by_reference),
    ],
    fake=_amax_fake,
    check=_check_ends,
    sharding=_amax_sharding,
)


def _scale_sharding(amax_bits: Spec) -> Rules:
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Placement] = [Replicate(), *map(Shard, range(len(amax_bits.shape)))]
    return [([placement], [placement]) for placement in placements]


global_scale_op = Operation(
    "global_scale(Tensor amax_bits, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_amax:global_scale"),
        Implementation(Backend.REFERENCE, lambda amax_bits: global_scale_of(amax_bits.view(torch.float32))),
    ],
    fake=lambda amax_bits: amax_bits.new_empty(amax_bits.shape, dtype=torch.float32),
    sharding=_scale_sharding,
)
