"""What tests of shards share: splits of tensors over ranks, buffers with canaries, and the cast of a split by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.shards.flat import CODES, ENTRIES, WHOLE, Shards, block_count
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

FORMATS = (FP8_128X128, NVFP4_16X16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
# (shape, first elements of ranks 1, 2, ..): on blocks; inside blocks, rows and bytes; ranks with nothing; odd widths;
# widths and heights below a block; several matrices; wide enough for two tiles.
SPLITS = {
    "aligned": ((64, 256), (4096, 8192)),
    "blocks straddle": ((40, 70), (701, 1403)),
    "odd": ((33, 51), (1, 52, 1001)),
    "one row a rank": ((3, 64), (64, 128)),
    "nothing": ((16, 48), (0, 0, 768)),
    "one element": ((1, 1), (0, 1)),
    "narrow": ((70, 5), (172,)),
    "low": ((2, 300), (299, 301)),
    "experts": ((3, 20, 33), (7, 661, 1319)),
    "two tiles": ((150, 290), (20001,)),
    "empty": ((0, 16), (0,)),
}
splits = pytest.mark.parametrize(("shape", "cuts"), SPLITS.values(), ids=SPLITS)
CANARY = 0xA5


def framed(x: torch.Tensor, aligned: bool = False):
    """A copy of `x` inside of a buffer of canaries, on or off 16 bytes, and a check that the canaries live."""
    before, after = (64, 64) if aligned else (3, 5)
    size = x.itemsize
    buffer = torch.full(((before + x.numel() + after) * size,), CANARY, dtype=torch.uint8, device=x.device)
    inside = buffer[before * size : (before + x.numel()) * size].view(x.dtype).view(x.shape)
    inside.copy_(x)

    def check():
        outside = torch.cat((buffer[: before * size], buffer[(before + x.numel()) * size :]))
        assert (outside == CANARY).all(), "wrote beside a buffer"

    return inside, check


def cut(w: torch.Tensor, cuts) -> list[tuple[int, torch.Tensor]]:
    """(start, flat shard in memory of its own) of each rank."""
    ends = [0, *sorted(min(c, w.numel()) for c in cuts), w.numel()]
    return [(start, w.flatten()[start:end].clone()) for start, end in itertools.pairwise(ends)]


def quantize(w: torch.Tensor, fmt, dtype, power_of_2=False):
    return ops.quantize(w.to(dtype), fmt, power_of_2_scales=power_of_2, backend="reference").rowwise


def amaxes(parts, shape, fmt, dtype, backend) -> torch.Tensor:
    """The reduced buffer: each rank fills its own, MAX joins them."""
    buffers = []
    for start, x in parts:
        buffers.append(torch.zeros(block_count(shape, fmt), dtype=torch.int32, device=x.device))
        shards.partial_block_amax_op(buffers[-1], Shards.of([x], [start], [shape], dtype, fmt), backend)
    return torch.stack(buffers).amax(0)


def scales_of(amax_bits, shape, fmt, backend, power_of_2=False):
    """(encode, scale, global_scale) of one tensor, written into buffers with canaries."""
    scale, check = framed(torch.zeros(fmt.scale_shape(*shape), dtype=fmt.scale_dtype, device=amax_bits.device))
    global_scales = [torch.full((), -1.0, device=amax_bits.device)] if fmt.has_global_scale else []
    encode = torch.empty_like(amax_bits, dtype=torch.float32)
    shards.block_scales_op(encode, [scale], global_scales, amax_bits, [0], fmt, power_of_2, backend)
    check()
    return encode, scale, *(global_scales or [None])


def payload(fmt, shape, fill=0x5A, device="cpu"):
    return torch.full(fmt.qdata_shape(*shape), fill, dtype=torch.uint8, device=device)


def check_split(w, parts, fmt, dtype, backend, power_of_2=False, aligned=False) -> None:
    """Shards written in all ways, into the whole payload, into their own and one code an entry, are the whole's bits.

    aligned: whether buffers begin on 16 bytes, where kernels move as much at a time if sizes allow it.
    """
    shape = w.shape
    expected = quantize(w, fmt, dtype, power_of_2)
    amax_bits = amaxes(parts, shape, fmt, dtype, backend)
    encode, scale, global_scale = scales_of(amax_bits, shape, fmt, backend, power_of_2)
    assert_bitwise_equal(scale, expected.scale, "scale")
    if fmt.has_global_scale:
        assert_bitwise_equal(global_scale, expected.global_scale, "global_scale")
    want = expected.qdata.view(torch.uint8)
    codes = fmt.element.unpack(want, shape[-1]).flatten()
    whole, check_whole = framed(payload(fmt, shape, device=w.device), aligned)
    pieces = []
    for start, values in parts:
        n = values.numel()
        master, check_master = framed(values, aligned)
        sizes = {ENTRIES: ops.shard_entries(start, n, shape[-1], fmt)[1], CODES: n}
        targets, checks = {WHOLE: whole}, [check_whole, check_master]
        for into, size in sizes.items():
            filled = torch.full((size,), 0x5A, dtype=torch.uint8, device=w.device)
            targets[into], check = framed(filled, aligned)
            checks.append(check)
        for into, target in targets.items():
            shard = Shards.of([master], [start], [shape], dtype, fmt)
            shards.partial_cast_op([target], shard, encode, into, backend)
        for check in checks:
            check()
        assert_bitwise_equal(master, values, "master")
        assert_bitwise_equal(targets[CODES], codes[start : start + n], "codes")
        pieces.append(targets[ENTRIES])
    assert_bitwise_equal(whole, want, "whole")
    merged, check = framed(payload(fmt, shape, 0x33, w.device), aligned)
    starts, lengths = [start for start, _ in parts], [shard.numel() for _, shard in parts]
    ops.merge_shards_([merged], [pieces], [starts], [lengths], [shape[-1]], fmt)
    check()
    assert_bitwise_equal(merged, want, "merged")


# Tensors for lists of them.
SHAPES = ((64, 256), (33, 51), (0, 16), (2, 21, 35), (16, 16), (130, 129))


def many(fmt, device, dtype=torch.bfloat16):
    """(shards of each of three ranks, expected copies) of tensors of several shapes and master dtypes."""
    masters = [DTYPES[i % 3] for i in range(len(SHAPES))]
    weights = [random_tensor(*s, dtype=d, device=device, seed=i) for i, (s, d) in enumerate(zip(SHAPES, masters))]
    parts = [cut(w, (w.numel() // 3 | 1, 64 * (w.numel() // 96))) for w in weights]
    ranks = [Shards.of(*reversed(list(zip(*part))), SHAPES, dtype, fmt) for part in zip(*parts)]
    return ranks, [quantize(w, fmt, dtype) for w in weights]
