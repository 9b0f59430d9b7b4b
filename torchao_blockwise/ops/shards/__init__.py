"""Flat shards: quantize tensors of which a rank holds a part, bitwise identical to quantizing each of them whole.

    shards ─ partial_block_amax ─▶ amax of block ∩ shard ─ MAX over ranks ─▶ block_scales ─▶ encode ─┐
       └──────────────────────────────────────────────────────────────────────▶ partial_cast ◀──────┘

Shards that cut no block can be quantized before the exchange: `whole_block_cast_op` reads them once for both steps.
`merge_shards_` writes gathered shards to whole payloads.

A shard is a flat, row-major range [start, start + n) of elements; it may cut rows, blocks and, in 4-bit formats, bytes.
Each step processes a list of tensors: the number of launches does not depend on its length, and nothing waits for the
device. The values of all blocks of the list are in one buffer, with the grid of each tensor row-major.

Callers check arguments of users (distributed/master_weights.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import E4M3, FP8_128X128, NVFP4_16X16, BlockFormat, get_format
from torchao_blockwise.ops.backend import triton_and_reference, why_no_encoders, why_no_kernels
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.shards import reference
from torchao_blockwise.ops.shards.flat import Shards, shard_entries

SHARDS = "Tensor[] tensors, SymInt[] starts, SymInt[] shapes, SymInt[] first_blocks, ScalarType dtype, str fmt"
_KERNELS = f"{__name__}.kernels_triton"


def _why_not(*args: object, encodes: bool = False) -> str | None:
    """Return why kernels cannot run, or None: they support the scales of two formats, and some round to e4m3."""
    fmt = next(arg.fmt if isinstance(arg, Shards) else arg for arg in args if isinstance(arg, (BlockFormat, Shards)))
    if fmt not in (FP8_128X128, NVFP4_16X16):
        return f"{fmt.name} has no kernel"
    x = next(arg for arg in args if isinstance(arg, torch.Tensor))
    return why_no_encoders(x) if encodes and fmt.element is E4M3 else why_no_kernels(x)


_why_no_cast = functools.partial(_why_not, encodes=True)

# Raises amax_bits, int32 [blocks], to the amax of block ∩ shard of each block of each tensor, as bits of |fp32|.
# Reduce it over ranks with MAX: as integers, magnitudes keep their order, with NaN above Inf above all others.
partial_block_amax_op = Operation(
    f"partial_block_amax_(Tensor(a!) amax_bits, {SHARDS}, str backend) -> ()",
    takes=(None, Shards),
    table=triton_and_reference(_KERNELS, reference.partial_block_amax_, _why_not),
)
# Writes values that depend on the amaxes: encode, f32 [blocks], the factor by which the values of each block are
# multiplied; the stored scales; and, in formats with global scales, f32 with one element, or one for each matrix.
block_scales_op = Operation(
    "block_scales_(Tensor(a!) encode, Tensor(b!)[] scales, Tensor(c!)[] global_scales, Tensor amax_bits, "
    "SymInt[] first_blocks, str fmt, bool power_of_2_scales, str backend) -> ()",
    table=triton_and_reference(_KERNELS, reference.block_scales_, _why_not),
)
# Writes the elements of each shard, rne(dtype(x) · encode), to its target, and nothing else. The target is contiguous
# bytes: the payload entries with elements of the shard; see `shard_entries`. If a 4-bit shard shares an entry with a
# neighbor, the other nibble does not change. In rows of odd w, the padding becomes zero together with the last element.
partial_cast_op = Operation(
    f"partial_cast_(Tensor(a!)[] targets, {SHARDS}, Tensor encode, str backend) -> ()",
    takes=(None, Shards, None),
    table=triton_and_reference(_KERNELS, reference.partial_cast_, _why_no_cast),
)
# Both `partial_block_amax_op` and `partial_cast_op` for shards that cut no block, in one read. Only for formats without
# a global scale, which depends on the whole tensor. amax_bits: zeros for the blocks of the shards.
whole_block_cast_op = Operation(
    f"whole_block_cast_(Tensor(a!)[] targets, Tensor(b!) amax_bits, {SHARDS}, bool power_of_2_scales, "
    "str backend) -> ()",
    takes=(None, None, Shards, None),
    table=triton_and_reference(_KERNELS, reference.whole_block_cast_, _why_no_cast),
)


def merge_shards_(
    targets: Sequence[torch.Tensor],
    shards: Sequence[Sequence[torch.Tensor]],
    starts: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    columns: Sequence[int],
    fmt: BlockFormat | str,
) -> None:
    """Write gathered shards to whole payloads. If two shards share a byte, each provides its own nibble.

    targets: payloads [.., h, packed(w)], contiguous. columns: w of each.
    shards, starts, lengths: lists for each target, with one item for each rank: the bytes that `partial_cast_op` writes
        (`shard_entries`, or more); the first element; the number of elements, or 0.
    Elements that no shard covers do not change; two shards must not cover the same one.
    """
    fmt = get_format(fmt)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    # Shared bytes: (target, source of the low nibble, source of the high nibble).
    edges: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for target, *of_target, width in zip(targets, shards, starts, lengths, columns, strict=True):
        whole, end = target.view(torch.uint8).view(-1), -1
        for piece, start, n in sorted(zip(*of_target, strict=True), key=lambda shard: shard[1]):
            if n == 0:
                continue
            first, count = shard_entries(start, n, width, fmt)
            here, piece = whole[first : first + count], piece.view(torch.uint8).view(-1)[:count]
            begins, ends = (fmt.element.per_byte > 1 and edge % width % 2 for edge in (start, start + n))
            if begins and start == end:
                edges[-1] = (*edges[-1][:2], piece[:1])
            elif begins:
                edges.append((here[:1], here[:1], piece[:1]))
            if ends:
                edges.append((here[-1:], piece[-1:], here[-1:]))
            copies.append((here[begins : count - ends], piece[begins : count - ends]))
            end = start + n
    if copies:
        _compat.foreach_copy_([target for target, _ in copies], [piece for _, piece in copies])
    if edges:
        at, low, high = zip(*edges)
        merged = torch.cat(low) & 0x0F | torch.cat(high) & 0xF0
        _compat.foreach_copy_(list(at), list(merged.split(1)))
