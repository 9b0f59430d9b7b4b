"""The operations of quantization: copies, the amaxes and tensor scales that they need, and the keys of random bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    CastOptions,
    Copies,
    Groups,
    Place,
    global_scale_of,
)
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, why_no_encoders
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.operands import new_copies, why_no_tiles
from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.registry import OPTIONS, PLACE, Operation, groups
from torchao_blockwise.ops.sharding import Rules, Spec, shards_on_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_KERNEL_FORMATS = {fmt.name for fmt in (FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16)}
_KERNELS = f"{__package__}.kernels"

# --- copies -----------------------------------------------------------------------------------------------------------


def _why_no_kernels(x: torch.Tensor, amax_bits: object, options: CastOptions, *_: object) -> str | None:
    if options.fmt.name not in _KERNEL_FORMATS:
        return f"{options.fmt.name} has no kernel yet"
    return why_no_encoders(x)


def _check_groups(x: torch.Tensor, amax_bits: object, options: CastOptions, groups: Groups | None, *_: object) -> None:
    if groups is not None:
        check_groups("quantize", groups, x.shape[0], x.device, options.fmt.block[1])


def _fake(x: torch.Tensor, amax_bits: object, options: CastOptions, groups: Groups | None, *_: object) -> Copies:
    return new_copies(x, x.shape, options, groups)


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

    first = len(x.shape) - 2
    copies = [(False, options.fmt)] * options.rowwise + [(True, options.columnwise_format)] * options.columnwise

    def rule(outputs: list[Placement], of_x: Placement, of_amax: Placement) -> tuple[list[Any], list[Any]]:
        of_groups = [None, None] if groups is None else [t if t is None else Replicate() for t in groups]
        of_key = None if key is None else Replicate()
        return outputs, [of_x, None if amax_bits is None else of_amax, *of_groups, of_key]

    def placed(dim: int, swapped: bool) -> Placement:
        """Where `dim` of x lies in what has its last two dims swapped."""
        return Shard(2 * first + 1 - dim if swapped and dim >= first else dim)

    replicated: list[Placement] = [Replicate()]
    rules: Rules = [rule(replicated * 2 * len(copies), Replicate(), Replicate())]
    if options.hadamard or groups is not None or key is not None:
        return rules
    for dim in range(len(x.shape)):
        # A shard that is padded by itself is another one than in the whole.
        whole = not options.padded or dim != first or x.shape[dim] % (padded_size(1) * x.mesh.size()) == 0
        if whole and all(shards_on_blocks(x, dim, fmt, columnwise) for columnwise, fmt in copies):
            outputs = [placed(dim, swapped != t) for swapped, fmt in copies for t in (False, fmt.transposed_scales)]
            is_of_matrices = options.scale_per_group and dim < first
            rules.append(rule(outputs, Shard(dim), Shard(dim) if is_of_matrices else Replicate()))
    return rules


_TABLE = [
    kernels(Backend.GLUON, f"{_KERNELS}_gluon:quantize", lambda x, amax_bits, options, *_: why_no_tiles(options, x)),
    kernels(Backend.TRITON, f"{_KERNELS}_triton:quantize", _why_no_kernels),
    Implementation(Backend.REFERENCE, reference.quantize),
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


def _check_ends(x: torch.Tensor, ends: torch.Tensor | None) -> None:
    if ends is not None:
        check_group_ends("quantize", ends, x.shape[0], x.device)


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
        kernels(Backend.TRITON, f"{_KERNELS}_amax:tensor_amax_bits"),
        Implementation(Backend.REFERENCE, reference.tensor_amax_bits),
    ],
    fake=_amax_fake,
    check=lambda x, ends, each: _check_ends(x, ends),
    sharding=_amax_sharding,
)

# Of x [M, K] and of its transform, of all or of each group: two tensors, which policies of checkpointing save, of one
# read.
hadamard_amax_bits_op = Operation(
    f"hadamard_amax_bits(Tensor x, SymInt hadamard, {groups('Tensor?')}, bool per_group, str backend)"
    " -> (Tensor, Tensor)",
    takes=(None, None, Groups, None),
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}_chunks:hadamard_amax_bits"),
        Implementation(Backend.REFERENCE, reference.hadamard_amax_bits),
    ],
    fake=lambda x, hadamard, groups, per_group: tuple(
        _amax_fake(x, groups and groups.ends, per_group and groups is not None) for _ in range(2)
    ),
    check=lambda x, hadamard, groups, per_group: _check_ends(x, groups and groups.ends),
    called="quantize",
)


def _scale_sharding(amax_bits: Spec) -> Rules:
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Placement] = [Replicate(), *map(Shard, range(len(amax_bits.shape)))]
    return [([placement], [placement]) for placement in placements]


global_scale_op = Operation(
    "global_scale(Tensor amax_bits, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}_amax:global_scale"),
        Implementation(Backend.REFERENCE, lambda amax_bits: global_scale_of(amax_bits.view(torch.float32))),
    ],
    fake=lambda amax_bits: amax_bits.new_empty(amax_bits.shape, dtype=torch.float32),
    sharding=_scale_sharding,
)

# --- random bits ------------------------------------------------------------------------------------------------------

# Which entry of a key counts its uses.
_USE = 2


def _take(key: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    taken = key.clone()
    with _compat.keeping_version(key):
        key.select(0, _USE).add_(1)
    return taken


# The schema does not say that `key` changes. Else no pass of a layer could run while another one's backward is to come:
# autograd refuses what was saved and changed. A compiler may do with it what it does with what reads a generator; it
# stays in the backward graph, as it takes the gradient. The count is no value that anything else reads.
take_key_op = Operation(
    "take_key(Tensor key, Tensor gradient) -> Tensor",
    table=[Implementation(Backend.AUTO, _take)],
    fake=lambda key, gradient: key.new_empty(key.shape),
)
