"""What operations on flat shards refuse, in their words."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops.shards.flat import ENTRIES

W = torch.ones(4, 16)
FLAT = W.flatten()
BITS, ENCODE = torch.zeros(1, dtype=torch.int32), torch.ones(1)
SHARD = {"dtype": torch.bfloat16}
BYTES = torch.zeros(4, 8, dtype=torch.uint8)


def amax(shards, starts, shapes, fmt="nvfp4_16x16", **options):
    return lambda: ops.partial_block_amax(shards, starts, shapes, fmt, **(SHARD | options))


def cast(targets, shards, starts, fmt="nvfp4_16x16", **options):
    return lambda: ops.partial_cast_(targets, shards, starts, [(4, 16)], ENCODE, fmt, **(SHARD | options))


def at_once(shard, start, fmt="fp8_128x128", shape=(4, 16), **options):
    targets = [torch.zeros(shard.numel(), dtype=torch.uint8)]
    return lambda: ops.whole_block_cast_(
        targets, [shard], [start], [shape], BITS, fmt, into=ENTRIES, **(SHARD | options)
    )


def merge(pieces, starts, lengths, target=BYTES):
    return lambda: ops.merge_shards_([target], [pieces], [starts], [lengths], [16], "nvfp4_16x16")


def scales(scale, global_scale=(), fmt="fp8_128x128", bits=BITS, **options):
    return lambda: ops.block_scales_(scale, global_scale, bits, fmt, **options)


REFUSALS = {
    "begins in a block": (
        at_once(FLAT[16:], 16),
        ValueError(
            "whole_block_cast_: elements [16, 64) of [4, 16] cut blocks of fp8_128x128; "
            "use partial_block_amax and partial_cast_"
        ),
    ),
    "ends in a row": (
        at_once(FLAT[:8], 0),
        ValueError(
            "whole_block_cast_: elements [0, 8) of [4, 16] cut blocks of fp8_128x128; "
            "use partial_block_amax and partial_cast_"
        ),
    ),
    "global scale": (
        at_once(FLAT, 0, "nvfp4_16x16"),
        ValueError(
            "whole_block_cast_: nvfp4_16x16 has a scale of the whole tensor; use partial_block_amax and partial_cast_"
        ),
    ),
    "lists": (
        amax([FLAT], [0, 0], [(4, 16)]),
        ValueError("partial_block_amax: shards, starts and shapes must be as many, got [1, 2, 1]"),
    ),
    "dtype": (
        amax([FLAT], [0], [(4, 16)], dtype=torch.float64),
        TypeError("partial_block_amax: dtype must be bfloat16, float16 or float32, got torch.float64"),
    ),
    "master dtype": (
        amax([FLAT.double()], [0], [(4, 16)]),
        TypeError("partial_block_amax: a shard must be bfloat16, float16 or float32, got torch.float64; cast it first"),
    ),
    "not flat": (
        amax([W], [0], [(4, 16)]),
        ValueError(
            "partial_block_amax: a shard must be flat and contiguous, got torch.float32 of shape [4, 16]; flatten it"
        ),
    ),
    "outside": (
        amax([FLAT], [1], [(4, 16)]),
        ValueError("partial_block_amax: elements [1, 65) do not lie in a tensor of shape [4, 16]"),
    ),
    "negative start": (
        amax([FLAT], [-1], [(4, 16)]),
        ValueError("partial_block_amax: elements [-1, 63) do not lie in a tensor of shape [4, 16]"),
    ),
    "shape": (
        amax([FLAT], [0], [(64,)]),
        ValueError("partial_block_amax: shapes must be [.., h, w], got [64]"),
    ),
    "out": (
        amax([FLAT], [0], [(4, 16)], out=torch.zeros(1)),
        ValueError(
            "partial_block_amax: out must be torch.int32 of at least 1 blocks, got torch.float32 of shape [1]"
        ),
    ),
    "devices": (
        amax([FLAT], [0], [(4, 16)], out=torch.zeros(1, dtype=torch.int32, device="meta")),
        ValueError("partial_block_amax: all tensors must be on one device, got cpu, meta"),
    ),
    "into": (
        cast([BYTES], [FLAT], [0], into="bits"),
        ValueError("partial_cast_: into must be whole, entries or codes, got 'bits'"),
    ),
    "target": (
        cast([BYTES], [FLAT[3:9]], [3], into=ENTRIES),
        ValueError(
            "partial_cast_: into entries the 6 elements from 3 of [4, 16] in nvfp4_16x16 take 4 contiguous bytes, "
            "got torch.uint8 of shape [4, 8]"
        ),
    ),
    "target's size": (
        cast([BYTES], [FLAT], [0], "fp8_128x128"),
        ValueError(
            "partial_cast_: into whole the 64 elements from 0 of [4, 16] in fp8_128x128 take 64 contiguous bytes, "
            "got torch.uint8 of shape [4, 8]"
        ),
    ),
    "targets": (
        cast([], [FLAT], [0]),
        ValueError("partial_cast_: 1 shards need as many targets, got 0"),
    ),
    "backend": (
        cast([BYTES], [FLAT], [0], backend="cublas"),
        ValueError("partial_cast_: backend cublas has no implementation; choose one of triton, reference, or auto"),
    ),
    "transposed grid": (
        scales([torch.ones(1, 4)], fmt=FP8_1X128),
        ValueError("block_scales_: fp8_1x128 stores its grid transposed; use a format with square blocks"),
    ),
    "power of 2": (
        scales([torch.ones(1)], fmt=NVFP4_1X16, power_of_2_scales=True),
        ValueError(
            "block_scales_: nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn"
        ),
    ),
    "global scales": (
        scales([torch.ones(1).to(torch.float8_e4m3fn)], fmt=NVFP4_16X16),
        ValueError("block_scales_: nvfp4_16x16 needs 1 global_scales for 1 tensors, got 0"),
    ),
    "scale": (
        scales([torch.ones(1, dtype=torch.bfloat16)]),
        ValueError(
            "block_scales_: scales must be contiguous torch.float32, got torch.bfloat16 of shape [1]; clone them"
        ),
    ),
    "amax buffer": (
        scales([torch.ones(2, 2)]),
        ValueError(
            "block_scales_: amax_bits must be torch.int32 of at least 4 blocks, got torch.int32 of shape [1]"
        ),
    ),
    "overlap": (
        merge([BYTES.view(-1), BYTES.view(-1)], [0, 5], [6, 2]),
        ValueError("merge_shards_: elements [5, 7) overlap others or leave torch.uint8 of shape [4, 8]"),
    ),
    "beyond": (
        merge([BYTES.view(-1)], [60], [6]),
        ValueError("merge_shards_: elements [60, 66) overlap others or leave torch.uint8 of shape [4, 8]"),
    ),
    "piece": (
        merge([BYTES.view(-1)[:2]], [3], [6]),
        ValueError("merge_shards_: 6 elements from 3 take 4 contiguous bytes, got torch.uint8 of shape [2]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, expected):
    with pytest.raises(type(expected)) as error:
        call()
    assert str(error.value) == str(expected)
