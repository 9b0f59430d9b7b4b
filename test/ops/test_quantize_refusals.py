"""Refusals of ops.quantize, also of groups, transforms, random bits and tensor scales, and their messages."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, StochasticRounding

X, ONE, TWO = torch.ones(4, 32), torch.ones(()), torch.ones(2)
ROUNDING = StochasticRounding(1, 2, 3)
PART = ROUNDING._replace(start=(16, 0))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


DTYPES = (torch.int32, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn)
CALLS = [
    *((X.to(dtype), FP8_1X128, {}) for dtype in DTYPES),
    (X[0], FP8_1X128, {}),
    (X, "fp8", {}),
    (X, FP8_1X128, {"rowwise": False}),
    (X, NVFP4_1X16, {"power_of_2_scales": True}),
    (X, FP8_1X128, {"scale_per_group": True}),
    (X, FP8_128X128, {"columnwise": FP8_1X128}),
    # Amaxes that are given.
    (X, FP8_1X128, {"tensor_amax": ONE}),
    (X, NVFP4_1X16, {"tensor_amax": TWO}),
    (X, NVFP4_1X16, {"tensor_amax": ONE.bfloat16()}),
    (X, NVFP4_1X16, {"groups": ends(1, 4), "scale_per_group": True, "tensor_amax": ONE}),
    (X, NVFP4_1X16, {"columnwise": True, "hadamard": True, "tensor_amax": ONE}),
    (X, NVFP4_1X16, {"tensor_amax": (ONE, ONE)}),
    # Transforms and random bits.
    (X, FP8_1X128, {"columnwise": True, "hadamard": True}),
    (X, NVFP4_1X16, {"hadamard": True}),
    (X, FP8_1X128, {"stochastic": ROUNDING}),
    (X, NVFP4_16X16, {"stochastic": ROUNDING}),
    (X[None], NVFP4_1X16, {"stochastic": ROUNDING}),
    (X, NVFP4_1X16, {"columnwise": True, "stochastic": PART}),
    (X, NVFP4_1X16, {"stochastic": StochasticRounding(-1, 0, 0)}),
    # Groups.
    (X, FP8_128X128, {"groups": ends(1, 4)}),
    (X[None], FP8_1X128, {"groups": ends(1, 4)}),
    (X, FP8_1X128, {"groups": ends(3, 2)}),
    (X, NVFP4_1X16, {"groups": ends(3, 5)}),
    (X, FP8_1X128, {"groups": torch.tensor([4])}),
    (X, FP8_1X128, {"groups": ends(1, 4).to("meta")}),
    # Backends.
    (X, FP8_1X128, {"backend": "cuda"}),
    (X, FP8_1X128, {"backend": "cublas", "columnwise": True}),
    (X, FP8_1X128, {"backend": "triton"}),
]


def test_refusals(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    messages = []
    for x, fmt, options in CALLS:
        with pytest.raises((TypeError, ValueError)) as error:
            ops.quantize(x, fmt, **options)
        messages.append(f"{error.type.__name__} {error.value}\n")
    assert_expected_inline(
        "".join(messages),
        """\
TypeError quantize: x must be bfloat16, float16 or float32, got torch.int32; cast it first
TypeError quantize: x must be bfloat16, float16 or float32, got torch.bool; cast it first
TypeError quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first
TypeError quantize: x must be bfloat16, float16 or float32, got torch.complex64; cast it first
TypeError quantize: x must be bfloat16, float16 or float32, got torch.float8_e4m3fn; cast it first
ValueError quantize: x must have at least 2 dims [.., M, K], got shape [32]; reshape it
ValueError unknown block format 'fp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16
ValueError quantize: nothing to compute; set rowwise, columnwise or both
ValueError quantize: nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn
ValueError quantize: scale_per_group is for formats with tensor scales, got fp8_1x128; leave it out
ValueError quantize: only fp8_1x128 supports another format, fp8_128x128, for the columnwise copy, got fp8_128x128 and fp8_1x128; call it once for each format
ValueError quantize: fp8_1x128 has no tensor scale; leave tensor_amax out
ValueError quantize: tensor_amax must be a float32 scalar, got torch.float32 of shape [2]
ValueError quantize: tensor_amax must be a float32 scalar, got torch.bfloat16 of shape []
ValueError quantize: tensor_amax must be [2] float32, one for each group, got torch.float32 of shape []
ValueError quantize: tensor_amax must be a tensor, or with hadamard a tuple: the tensor's amax, the transform's amax
ValueError quantize: tensor_amax must be a tensor, or with hadamard a tuple: the tensor's amax, the transform's amax
ValueError quantize: hadamard is for nvfp4_1x16, got fp8_1x128; leave it out
ValueError quantize: hadamard transforms the columnwise copy, which is not requested; leave it out
ValueError quantize: stochastic is for nvfp4_1x16, got fp8_1x128; leave it out
ValueError quantize: stochastic is for nvfp4_1x16, got nvfp4_16x16; leave it out
ValueError quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims
ValueError quantize: start and grid of stochastic refer to the blocks of one copy, but both copies are requested; request them in separate calls, the columnwise one with stream + 1
ValueError stochastic: seed must be from 0 to 2^64 - 1, got -1
ValueError quantize: tokens in groups need a format with one-row blocks, got fp8_128x128; use fp8_1x128 or nvfp4_1x16, the formats of activations
ValueError quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims
ValueError quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 2 after 3; pass the cumulative sum of the groups' sizes
ValueError quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 5 after 3; pass the cumulative sum of the groups' sizes
TypeError quantize: group_ends must be int32, got torch.int64; use group_ends.int()
ValueError quantize: group_ends must be on the tokens' device cpu, got meta; move it
ValueError unknown backend 'cuda'; the backends are auto, reference, triton, cublas, gluon, deep_gemm, cutlass; did you mean 'cublas'?
ValueError quantize: backend cublas has no implementation; choose one of gluon, triton, reference, or auto
ValueError quantize: backend triton cannot run: Triton kernels need a CUDA device, got cpu (TRITON_INTERPRET=1 interprets them on a CPU); choose another, or auto
""",  # noqa: E501
    )
