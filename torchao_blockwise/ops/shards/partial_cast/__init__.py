"""Partial cast: quantize tensors of which a rank holds flat shards, with the bits of quantizing each of them whole.

    shards ─ partial_block_amax ─▶ amax of block ∩ shard ─ MAX over ranks ─▶ block_scales_ ─▶ encode ─┐
       └──────────────────────────────────────────────────────────────────────▶ partial_cast_ ◀──────┘

Shards that cut no block need no exchange before their payload: `whole_block_cast_` reads them once for both.

A shard is a flat, row-major range [start, start + n) of elements; it may cut rows, blocks and, in 4-bit formats, bytes.
Each step takes a list of tensors at once: launches do not grow with the list, and nothing waits for the device. Values
of all blocks of the list lie one tensor after the other in one buffer, each tensor's grid row-major.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16, BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, why_no_encoders, why_no_kernels
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.shards.flat import (
    CODES,
    ENTRIES,
    WHOLE,
    Shards,
    check_buffer,
    check_devices,
    check_shards,
    cuts_no_block,
    described,
    place_blocks,
    target_size,
)
from torchao_blockwise.ops.shards.partial_cast import reference

_KERNEL_FORMATS = (FP8_128X128, NVFP4_16X16)


def partial_block_amax(
    shards: Sequence[torch.Tensor],
    starts: Sequence[int],
    shapes: Sequence[Sequence[int]],
    fmt: BlockFormat | str,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    first_blocks: Sequence[int] | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """amax of block ∩ shard for each block of each tensor, 0 where that is empty, as the bits of |fp32|.

    shards: flat [n] bf16 | f16 | f32, contiguous; rounded to `dtype` first, as the whole tensor would be.
    starts: element of the tensor that each shard begins with. shapes: of the whole tensors, [.., h, w].
    out: int32 [blocks]; raised to the amaxes in place and returned. By default new, zero where no shard is.
    first_blocks: where each tensor's blocks begin in `out`; by default one tensor after the other.
    Reduce it over ranks with MAX: as integers magnitudes keep their order, with Inf above them and NaN above Inf.
    Raises TypeError for dtypes, ValueError for shards outside their tensors, sizes, devices or a backend.
    """
    op, fmt = "partial_block_amax", get_format(fmt)
    flat, total = check_shards(op, shards, starts, shapes, first_blocks, dtype, fmt)
    if out is None:
        device = shards[0].device if shards else None
        out = torch.zeros(total, dtype=torch.int32, device=device)
    check_buffer(op, "out", out, torch.int32, total)
    check_devices(op, [out, *shards])
    partial_block_amax_op(out, flat, backend)
    return out


def block_scales_(
    scales: Sequence[torch.Tensor],
    global_scales: Sequence[torch.Tensor] | None,
    amax_bits: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    power_of_2_scales: bool = False,
    first_blocks: Sequence[int] | None = None,
    encode: torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """Write what the block amaxes of each tensor decide; returns the factor that each block's values are multiplied by.

    scales: the stored grids, written in place, contiguous. global_scales: their f32 scalars, for formats that have one;
        a tensor's amax is the largest of its blocks' amaxes. Of several elements, contiguous: one for each matrix
        [h, w] of the tensor, whose blocks come one matrix after the other.
    amax_bits: int32 [blocks], as `partial_block_amax` gives it, reduced over ranks.
    first_blocks: where each tensor's blocks begin in `amax_bits` and `encode`; by default one tensor after the other.
    encode: f32 [blocks], written in place and returned; by default new.
    Zero, NaN and Inf as in `quantize`. Raises TypeError and ValueError like `partial_block_amax`.
    """
    op, fmt = "block_scales_", get_format(fmt)
    if fmt.transposed_scales:
        raise ValueError(f"{op}: {fmt.name} stores its grid transposed; use a format with square blocks")
    if power_of_2_scales and not fmt.has_power_of_2_scales:
        raise ValueError(f"{op}: {fmt.name} has no power_of_2_scales; its block scales are {fmt.scale_dtype}")
    global_scales = list(global_scales or ())
    wanted = len(scales) if fmt.has_global_scale else 0
    if len(global_scales) != wanted:
        raise ValueError(
            f"{op}: {fmt.name} needs {wanted} global_scales for {len(scales)} tensors, got {len(global_scales)}"
        )
    for scale in scales:
        if scale.dtype != fmt.scale_dtype or not scale.is_contiguous():
            raise ValueError(f"{op}: scales must be contiguous {fmt.scale_dtype}, got {described(scale)}; clone them")
    for scale, of_matrices in zip(scales, global_scales):
        fits = of_matrices.numel() == 1 or scale.numel() % max(1, of_matrices.numel()) == 0
        if of_matrices.dtype != torch.float32 or not fits or not of_matrices.is_contiguous():
            got = f"{described(of_matrices)} for {described(scale)}"
            raise ValueError(
                f"{op}: global_scales must be float32 scalars, or contiguous with one for each matrix, got {got}"
            )
    first_blocks, total = place_blocks(op, [scale.numel() for scale in scales], first_blocks)
    check_buffer(op, "amax_bits", amax_bits, torch.int32, total)
    if encode is None:
        encode = torch.empty_like(amax_bits, dtype=torch.float32)
    check_buffer(op, "encode", encode, torch.float32, total)
    check_devices(op, [amax_bits, encode, *scales, *global_scales])
    block_scales_op(encode, list(scales), global_scales, amax_bits, first_blocks, fmt, power_of_2_scales, backend)
    return encode


def partial_cast_(
    targets: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    starts: Sequence[int],
    shapes: Sequence[Sequence[int]],
    encode: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    dtype: torch.dtype,
    into: str = WHOLE,
    first_blocks: Sequence[int] | None = None,
    backend: Backend | str | None = None,
) -> None:
    """Write each shard's elements, rne(dtype(x) · encode), to its target, and nothing else.

    targets: 1-byte payload, contiguous, each at most once. By `into`:
        "whole": the tensor's payload [.., h, packed(w)].
        "entries": the payload entries that hold the shard alone, `shard_entries` of them, flat.
        "codes": one element an entry [n], flat; 4-bit codes in the low bits.
        Of an entry that a 4-bit shard shares with a neighbor the other nibble stays; what pads a row of odd w becomes
        zero together with the row's last element.
    shards, starts, shapes, dtype: as in `partial_block_amax`. encode: f32 [blocks], from `block_scales_`.
    Together with a MAX over ranks between them the three steps give the bits of `quantize` of the whole tensor.
    Raises TypeError and ValueError like `partial_block_amax`.
    """
    op, fmt = "partial_cast_", get_format(fmt)
    flat, total = check_shards(op, shards, starts, shapes, first_blocks, dtype, fmt)
    check_buffer(op, "encode", encode, torch.float32, total)
    _check_targets(op, targets, shards, starts, shapes, fmt, into)
    check_devices(op, [encode, *targets, *shards])
    partial_cast_op(list(targets), flat, encode, into, backend)


def whole_block_cast_(
    targets: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    starts: Sequence[int],
    shapes: Sequence[Sequence[int]],
    amax_bits: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    dtype: torch.dtype,
    power_of_2_scales: bool = False,
    into: str = WHOLE,
    first_blocks: Sequence[int] | None = None,
    backend: Backend | str | None = None,
) -> None:
    """`partial_block_amax` and `partial_cast_` of shards that cut no block, in one read of them.

    amax_bits: int32 [blocks], zeros where the shards' blocks are; their amaxes are written there, for `block_scales_`.
    All else as in `partial_cast_`; the same bits. Raises TypeError and ValueError like it; ValueError too for a shard
    that cuts a block, and for formats with a global scale, which needs all of a tensor first.
    """
    op, fmt = "whole_block_cast_", get_format(fmt)
    if fmt.has_global_scale:
        raise ValueError(f"{op}: {fmt.name} has a scale of the whole tensor; use partial_block_amax and partial_cast_")
    if power_of_2_scales and not fmt.has_power_of_2_scales:
        raise ValueError(f"{op}: {fmt.name} has no power_of_2_scales; its block scales are {fmt.scale_dtype}")
    flat, total = check_shards(op, shards, starts, shapes, first_blocks, dtype, fmt)
    for shard, start, shape in zip(shards, starts, shapes):
        if not cuts_no_block(start, shard.numel(), shape, fmt):
            raise ValueError(
                f"{op}: elements [{start}, {start + shard.numel()}) of {list(shape)} cut blocks of {fmt.name}; "
                "use partial_block_amax and partial_cast_"
            )
    check_buffer(op, "amax_bits", amax_bits, torch.int32, total)
    _check_targets(op, targets, shards, starts, shapes, fmt, into)
    check_devices(op, [amax_bits, *targets, *shards])
    whole_block_cast_op(list(targets), amax_bits, flat, power_of_2_scales, into, backend)


def _check_targets(
    op: str,
    targets: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    starts: Sequence[int],
    shapes: Sequence[Sequence[int]],
    fmt: BlockFormat,
    into: str,
) -> None:
    if into not in (WHOLE, ENTRIES, CODES):
        raise ValueError(f"{op}: into must be whole, entries or codes, got {into!r}")
    if len(targets) != len(shards):
        raise ValueError(f"{op}: {len(shards)} shards need as many targets, got {len(targets)}")
    for target, shard, start, shape in zip(targets, shards, starts, shapes):
        wanted = target_size(shard.numel(), start, shape, fmt, into)
        if target.itemsize != 1 or target.numel() != wanted or not target.is_contiguous():
            raise ValueError(
                f"{op}: into {into} the {shard.numel()} elements from {start} of {list(shape)} in {fmt.name} take "
                f"{wanted} contiguous bytes, got {described(target)}"
            )


# --- operations -------------------------------------------------------------------------------------------------------


def _why_no_kernels(x: torch.Tensor, *args: object) -> str | None:
    fmt = next(arg.fmt if isinstance(arg, Shards) else arg for arg in args if isinstance(arg, (BlockFormat, Shards)))
    return why_no_kernels(x) if fmt in _KERNEL_FORMATS else f"{fmt.name} has no kernel"


def _why_no_casts(targets: list[torch.Tensor], shards: Shards, encode: torch.Tensor, into: str) -> str | None:
    reason = why_no_encoders(encode) if shards.fmt.element.per_byte == 1 else None
    return reason or _why_no_kernels(encode, shards)


def _why_no_whole_casts(targets: list[torch.Tensor], amax_bits: torch.Tensor, shards: Shards, *_: object) -> str | None:
    return why_no_encoders(amax_bits) or _why_no_kernels(amax_bits, shards)


_KERNELS = f"{__name__}.kernels_triton"

SHARDS = "Tensor[] tensors, SymInt[] starts, SymInt[] shapes, SymInt[] first_blocks, ScalarType dtype, str fmt"

partial_block_amax_op = Operation(
    f"partial_block_amax_(Tensor(a!) amax_bits, {SHARDS}, str backend) -> ()",
    takes=(None, Shards),
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:partial_block_amax_", _why_no_kernels),
        Implementation(Backend.REFERENCE, reference.partial_block_amax_),
    ],
)
block_scales_op = Operation(
    "block_scales_(Tensor(a!) encode, Tensor(b!)[] scales, Tensor(c!)[] global_scales, Tensor amax_bits, "
    "SymInt[] first_blocks, str fmt, bool power_of_2_scales, str backend) -> ()",
    takes=(None, None, None, None, None, BlockFormat, None),
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:block_scales_", _why_no_kernels),
        Implementation(Backend.REFERENCE, reference.block_scales_),
    ],
)
partial_cast_op = Operation(
    f"partial_cast_(Tensor(a!)[] targets, {SHARDS}, Tensor encode, str into, str backend) -> ()",
    takes=(None, Shards, None, None),
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:partial_cast_", _why_no_casts),
        Implementation(Backend.REFERENCE, reference.partial_cast_),
    ],
)
whole_block_cast_op = Operation(
    f"whole_block_cast_(Tensor(a!)[] targets, Tensor(b!) amax_bits, {SHARDS}, bool power_of_2_scales, str into, "
    "str backend) -> ()",
    takes=(None, None, Shards, None, None),
    table=[
        kernels(Backend.TRITON, f"{_KERNELS}:whole_block_cast_", _why_no_whole_casts),
        Implementation(Backend.REFERENCE, reference.whole_block_cast_),
    ],
)
