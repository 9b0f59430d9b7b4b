"""Splits of tensors over ranks, buffers with canaries, and the cast of a split by hand, for tests of shards."""

import itertools

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.shards.flat import Shards, block_count
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
    "on 16 bytes": ((3, 72, 352), (32, 32 * 700, 32 * 701)),
    "empty": ((0, 16), (0,)),
}
splits = pytest.mark.parametrize(("shape", "cuts"), SPLITS.values(), ids=SPLITS)
CANARY = 0xA5


def framed(x: torch.Tensor, aligned: bool = False):
    """A copy of `x` inside a buffer of canaries, on or off 16 bytes, and a check that the canaries live."""
    before, after = (64, 64) if aligned else (3, 5)
    size = x.itemsize
    buffer = torch.full(((before + x.numel() + after) * size,), CANARY, dtype=torch.uint8, device=x.device)
    inside = buffer[before * size : (before + x.numel()) * size].view(x.dtype).view(x.shape)
    inside.copy_(x)

    def check():
        outside = torch.cat((buffer[: before * size], buffer[(before + x.numel()) * size :]))
        assert (outside == CANARY).all(), "wrote next to a buffer"

    return inside, check


def cut(w: torch.Tensor, cuts) -> list[tuple[int, torch.Tensor]]:
    """(start, flat shard in separate memory) of each rank."""
    ends = [0, *sorted(min(c, w.numel()) for c in cuts), w.numel()]
    return [(start, w.flatten()[start:end].clone()) for start, end in itertools.pairwise(ends)]


def quantize(w: torch.Tensor, fmt, dtype, power_of_2=False, scale_per_matrix=False):
    options = {"power_of_2_scales": power_of_2, "scale_per_group": scale_per_matrix}
    return ops.quantize(w.to(dtype), fmt, **options, backend="reference").rowwise


def ranks_of(parts, shapes, dtype, fmt) -> list[Shards]:
    """The shards of a list of tensors that each rank holds. parts: for each tensor (start, shard) of each rank."""
    return [Shards.of(*reversed(list(zip(*of_rank))), shapes, dtype, fmt) for of_rank in zip(*parts)]


def amaxes(ranks, shapes, fmt, backend) -> torch.Tensor:
    """The reduced buffer: each rank fills its own, MAX joins them."""
    count, device = sum(block_count(shape, fmt) for shape in shapes), ranks[0].tensors[0].device
    buffers = torch.zeros(len(ranks), count, dtype=torch.int32, device=device)
    for rank, buffer in zip(ranks, buffers):
        shards.partial_block_amax_op(buffer, rank, backend)
    return buffers.amax(0)


def scales_of(amax_bits, shapes, fmt, backend, power_of_2=False, scale_per_matrix=False):
    """(encode, scales, global_scales) of tensors, written into buffers with canaries."""
    device = amax_bits.device
    scales, checks = zip(
        *(framed(torch.zeros(fmt.scale_shape(*shape), dtype=fmt.scale_dtype, device=device)) for shape in shapes)
    )
    of_scales = [shape[:-2] if scale_per_matrix else () for shape in shapes] if fmt.has_global_scale else []
    global_scales = [torch.full(shape, -1.0, device=device) for shape in of_scales]
    encode = torch.empty_like(amax_bits, dtype=torch.float32)
    firsts = [0, *itertools.accumulate(block_count(shape, fmt) for shape in shapes)][:-1]
    shards.block_scales_op(encode, list(scales), global_scales, amax_bits, firsts, fmt, power_of_2, backend)
    for check in checks:
        check()
    return encode, scales, global_scales


def payload(fmt, shape, fill=0x5A, device="cpu"):
    return torch.full(fmt.qdata_shape(*shape), fill, dtype=torch.uint8, device=device)


def check_split(weights, parts, fmt, dtype, backend, power_of_2=False, aligned=False, scale_per_matrix=False) -> None:
    """Shards written into their places in whole payloads, and into separate buffers, are the wholes' bits.

    weights: tensors. parts: for each of them (start, shard) of each rank. aligned: whether buffers begin on 16 bytes,
        where kernels move as much at a time if sizes allow it.
    """
    shapes = [w.shape for w in weights]
    expected = [quantize(w, fmt, dtype, power_of_2, scale_per_matrix) for w in weights]
    amax_bits = amaxes(ranks_of(parts, shapes, dtype, fmt), shapes, fmt, backend)
    encode, scales, global_scales = scales_of(amax_bits, shapes, fmt, backend, power_of_2, scale_per_matrix)
    for i, q in enumerate(expected):
        assert_bitwise_equal(scales[i], q.scale, f"scale {i}")
        if global_scales:
            assert_bitwise_equal(global_scales[i], q.global_scale, f"global_scale {i}")
    want = [q.qdata.view(torch.uint8) for q in expected]
    checks = []

    def buffer(x):
        x, check = framed(x, aligned)
        checks.append(check)
        return x

    whole = [buffer(payload(fmt, shape, device=w.device)) for shape, w in zip(shapes, weights)]
    pieces = []
    for of_rank in zip(*parts):
        masters = [buffer(values) for _, values in of_rank]
        rank = Shards.of(masters, [start for start, _ in of_rank], shapes, dtype, fmt)
        entries = [ops.shard_entries(start, len(x), shape[-1], fmt) for (start, x), shape in zip(of_rank, shapes)]
        places = [w.view(-1)[first : first + count] for w, (first, count) in zip(whole, entries)]
        own = [buffer(torch.full((n,), 0x5A, dtype=torch.uint8, device=w.device)) for w, (_, n) in zip(whole, entries)]
        for targets in (places, own):
            shards.partial_cast_op(targets, rank, encode, backend)
        for (_, values), master in zip(of_rank, masters):
            assert_bitwise_equal(master, values, "master")
        pieces.append(own)
    merged = [buffer(payload(fmt, shape, 0x33, w.device)) for shape, w in zip(shapes, weights)]
    starts, lengths = ([[of(part) for part in each] for each in parts] for of in (lambda p: p[0], lambda p: len(p[1])))
    ops.merge_shards_(merged, list(zip(*pieces)), starts, lengths, [shape[-1] for shape in shapes], fmt)
    for check in checks:
        check()
    for got, also, q in zip(whole, merged, want):
        assert_bitwise_equal(got, q, "whole")
        assert_bitwise_equal(also, q, "merged")


# Tensors for lists of them.
SHAPES = ((64, 256), (33, 51), (0, 16), (2, 21, 35), (16, 16), (130, 129))


def many(device):
    """(weights of several shapes and dtypes, (start, shard) of each of three ranks)."""
    weights = [random_tensor(*s, dtype=DTYPES[i % 3], device=device, seed=i) for i, s in enumerate(SHAPES)]
    return weights, [cut(w, (w.numel() // 3 | 1, 64 * (w.numel() // 96))) for w in weights]
