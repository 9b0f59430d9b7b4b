"""The operations of quantization: copies, the amaxes and tensor scales that they need, and the keys of random bits."""

from __future__ import annotations

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
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, triton_and_reference, why_no_encoders
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.operands import new_copies, why_no_tiles
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.registry import OPTIONS, PLACE, Operation, groups

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


_TABLE = [
    kernels(Backend.GLUON, f"{_KERNELS}_gluon:quantize", lambda x, amax_bits, options, *_: why_no_tiles(options, x)),
    kernels(Backend.TRITON, f"{_KERNELS}_triton:quantize", _why_no_kernels),
    Implementation(Backend.REFERENCE, reference.quantize),
]

# x [.., M, K] -> (qdata, scale) of each requested copy. amax_bits: of the tensor, or of each group or matrix; None for
# formats without tensor scales. key: of the random bits, None for round to nearest. With a key or a transform, only one
# copy of x [M, K] can be requested.
# Two operations, because a schema declares the number of returned tensors; they share one table.
quantize_op, quantize_both_op = (
    Operation(
        f"{name}(Tensor x, Tensor? amax_bits, {OPTIONS}, {groups('Tensor?')}, Tensor? key, {PLACE}, str backend)"
        f" -> {returns}",
        takes=(None, None, CastOptions, Groups, None, Place),
        table=_TABLE,
        fake=_fake,
        check=_check_groups,
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


# The amax of x, or of its rows in groups; each: that of each group, or of each matrix of x [.., M, K]. Returned as
# bits, because a MAX of floats over ranks loses NaN. As integers, magnitudes keep their order, with NaN above all.
tensor_amax_bits_op = Operation(
    "tensor_amax_bits(Tensor x, Tensor? group_ends, bool each, str backend) -> Tensor",
    table=triton_and_reference(f"{_KERNELS}_amax", reference.tensor_amax_bits),
    fake=_amax_fake,
    check=lambda x, ends, each: _check_ends(x, ends),
)

# The amaxes of x [M, K] and of its transform, of the whole tensor or of each group, from one read of x. Checkpointing
# policies save these two tensors.
hadamard_amax_bits_op = Operation(
    f"hadamard_amax_bits(Tensor x, SymInt hadamard, {groups('Tensor?')}, bool per_group, str backend)"
    " -> (Tensor, Tensor)",
    takes=(None, None, Groups, None),
    table=triton_and_reference(f"{_KERNELS}_chunks", reference.hadamard_amax_bits),
    fake=lambda x, hadamard, groups, per_group: tuple(
        _amax_fake(x, groups and groups.ends, per_group and groups is not None) for _ in range(2)
    ),
    check=lambda x, hadamard, groups, per_group: _check_ends(x, groups and groups.ends),
    called="quantize",
)

global_scale_op = Operation(
    "global_scale(Tensor amax_bits, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}_amax:global_scale"),
        Implementation(Backend.REFERENCE, lambda amax_bits: global_scale_of(amax_bits.view(torch.float32))),
    ],
    fake=lambda amax_bits: amax_bits.new_empty(amax_bits.shape, dtype=torch.float32),
)

# --- random bits ------------------------------------------------------------------------------------------------------

# The entry of a key that counts its uses.
_USE = 2


def _take(key: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    taken = key.clone()
    with _compat.keeping_version(key):
        key.select(0, _USE).add_(1)
    return taken


# The schema does not declare that `key` changes. Otherwise, autograd would refuse a backward pass if another one ran
# since the forward pass, because the saved key changed. Compilers treat the operation like one that reads a random
# generator. It stays in the backward graph because it takes the gradient. Nothing else reads the count.
take_key_op = Operation(
    "take_key(Tensor key, Tensor gradient) -> Tensor",
    table=[Implementation(Backend.AUTO, _take)],
    fake=lambda key, gradient: key.new_empty(key.shape),
)
