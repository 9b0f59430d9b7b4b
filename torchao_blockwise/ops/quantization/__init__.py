"""Quantize: one read of a high-precision tensor to its rowwise and columnwise copies; see ops/casting.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    CastOptions,
    Copies,
    Operand,
    global_scale_of,
)
from torchao_blockwise.ops.backend import Backend, Implementation, why_no_encoders, why_no_kernels
from torchao_blockwise.ops.op import define_op
from torchao_blockwise.ops.operands import new_copies, why_no_tiles
from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.sharding import Rules, Spec, shards_on_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_KERNEL_FORMATS = {fmt.name for fmt in (FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16)}


def scaling_backend(backend: Backend) -> Backend:
    """Who computes amaxes and tensor scales beside casts on `backend`."""
    # The oracle's are its own. Of the others not all have kernels for these.
    return Backend.REFERENCE if backend is Backend.REFERENCE else Backend.AUTO


def _by_reference(x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions) -> Copies:
    return reference.copies(x, options, amax_of(amax_bits))


def amax_of(bits: torch.Tensor | None) -> torch.Tensor | None:
    """The amax whose bits travel between ranks as an integer."""
    return None if bits is None else bits.view(torch.float32)


def why_no_quantizers(x: torch.Tensor, *args: object) -> str | None:
    """Why Triton kernels cannot quantize `x` by the options behind it, or None if they can."""
    for arg in args:
        if isinstance(arg, CastOptions) and arg.fmt.name not in _KERNEL_FORMATS:
            return f"{arg.fmt.name} has no kernel yet"
    return why_no_encoders(x)


def _global_scale_sharding(amax_bits: Spec, backend: Backend) -> Rules:
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Placement] = [Replicate(), *map(Shard, range(len(amax_bits.shape)))]
    return [([placement], [placement, None]) for placement in placements]


def _amax_sharding(x: Spec, backend: Backend) -> Rules:
    from torch.distributed.tensor import Partial, Replicate, Shard

    sharded: Rules = [([Partial("max")], [Shard(dim), None]) for dim in range(len(x.shape))]
    return [([Replicate()], [Replicate(), None]), *sharded]


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


def _sharding(x: Spec, amax_bits: Spec | None, options: CastOptions, backend: Backend) -> Rules:
    """x replicated, or sharded on a dim whose shards end on block borders; without an amax NVFP4 needs all of x."""
    from torch.distributed.tensor import Replicate, Shard

    copies = [columnwise for columnwise, asked in ((False, options.rowwise), (True, options.columnwise)) if asked]
    amax = None if amax_bits is None else Replicate()
    replicated: list[Placement] = [Replicate()]
    rules: Rules = [(replicated * 2 * len(copies), [Replicate(), amax, None, None])]
    for dim in range(len(x.shape)):
        # A shard that is padded by itself is another one than in the whole.
        whole = not options.padded or dim != len(x.shape) - 2 or x.shape[dim] % (padded_size(1) * x.mesh.size()) == 0
        if whole and all(shards_on_blocks(x, dim, options.fmt, columnwise) for columnwise in copies):
            outputs = [p for columnwise in copies for p in _copy_placements(x, options.fmt, columnwise, dim)]
            is_of_matrices = options.scale_per_group and dim < len(x.shape) - 2
            rules.append((outputs, [Shard(dim), Shard(dim) if is_of_matrices else amax, None, None]))
    return rules


_TABLE = [
    Implementation(
        Backend.GLUON, f"{__name__}.kernels_gluon:quantize", lambda x, amax_bits, options: why_no_tiles(options, x)
    ),
    Implementation(Backend.TRITON, f"{__name__}.kernels_triton:quantize", why_no_quantizers),
    Implementation(Backend.REFERENCE, _by_reference),
]


@define_op(_TABLE, sharding=_sharding)
def quantize_op(x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, backend: Backend) -> Operand:
    return new_copies(x, x.shape, options)  # type: ignore[return-value]  # with one of them


@define_op(_TABLE, sharding=_sharding, said="quantize")
def quantize_both_op(
    x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, backend: Backend
) -> tuple[Operand, Operand]:
    return new_copies(x, x.shape, options)


# Bits, because a MAX over ranks loses a NaN among floats; as integers magnitudes keep their order, NaN above all.
@define_op(
    (
        Implementation(Backend.TRITON, f"{__name__}.kernels_amax:tensor_amax_bits", why_no_kernels),
        Implementation(Backend.REFERENCE, lambda x: reference.tensor_amax(x).view(torch.int32)),
    ),
    sharding=_amax_sharding,
)
def tensor_amax_bits_op(x: torch.Tensor, backend: Backend) -> torch.Tensor:
    return x.new_empty((), dtype=torch.int32)


def _matrix_amax_sharding(x: Spec, backend: Backend) -> Rules:
    from torch.distributed.tensor import Partial, Replicate, Shard

    inner = len(x.shape) - 2
    sharded: Rules = [
        ([Shard(dim) if dim < inner else Partial("max")], [Shard(dim), None]) for dim in range(len(x.shape))
    ]
    return [([Replicate()], [Replicate(), None]), *sharded]


@define_op(
    (
        Implementation(Backend.TRITON, f"{__name__}.kernels_amax:matrix_amax_bits", why_no_kernels),
        Implementation(Backend.REFERENCE, lambda x: reference.matrix_amaxes(x).view(torch.int32)),
    ),
    sharding=_matrix_amax_sharding,
)
def matrix_amax_bits_op(x: torch.Tensor, backend: Backend) -> torch.Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.int32)


@define_op(
    (
        Implementation(Backend.TRITON, f"{__name__}.kernels_amax:global_scale", why_no_kernels),
        Implementation(Backend.REFERENCE, lambda amax_bits: global_scale_of(amax_bits.view(torch.float32))),
    ),
    sharding=_global_scale_sharding,
)
def global_scale_op(amax_bits: torch.Tensor, backend: Backend) -> torch.Tensor:
    # Not the number itself: with dynamic=True a compiler makes a float symbolic, and PyTorch 2.13 then fails in the
    # backward of a second layer.
    return amax_bits.new_empty(amax_bits.shape, dtype=torch.float32)
