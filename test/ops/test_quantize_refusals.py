"""What ops.quantize refuses, also of groups, transforms, random bits and tensor scales, with which message."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, StochasticRounding

X, ONE, TWO = torch.ones(4, 32), torch.ones(()), torch.ones(2)
ENDS, ROUNDING = torch.tensor([1, 4], dtype=torch.int32), StochasticRounding(1, 2, 3)
NO_KERNEL_DEVICE = "Triton kernels run on CUDA devices, got cpu (TRITON_INTERPRET=1 interprets them on a CPU)"
TWO_AMAXES = "tensor_amax must be two, of the tensor and of its transform, with hadamard, and one without it"
DTYPE = "x must be bfloat16, float16 or float32, got {}; cast it first"
DTYPES = (torch.int32, torch.uint8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# x, format, options, message. A message of another operation than `quantize` names it.
REFUSALS = {
    **{str(dtype): (X.to(dtype), FP8_1X128, {}, DTYPE.format(dtype)) for dtype in DTYPES},
    "1-D": (X[0], FP8_1X128, {}, "x must have at least 2 dims [.., M, K], got shape [32]; reshape it"),
    "nothing asked": (X, FP8_1X128, {"rowwise": False}, "nothing to compute; ask for rowwise, columnwise or both"),
    "power_of_2 on nvfp4": (
        X,
        NVFP4_1X16,
        {"power_of_2_scales": True},
        "nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn",
    ),
    "scale_per_group on fp8": (
        X,
        FP8_1X128,
        {"scale_per_group": True},
        "scale_per_group is for tensor scales, which fp8_1x128 has not; leave it out",
    ),
    "amax on fp8": (X, FP8_1X128, {"tensor_amax": ONE}, "fp8_1x128 has no tensor scale; leave tensor_amax out"),
    "amaxes of one": (
        X,
        NVFP4_1X16,
        {"tensor_amax": TWO},
        "tensor_amax must be a float32 scalar, got torch.float32 of shape [2]",
    ),
    "amax in bf16": (
        X,
        NVFP4_1X16,
        {"tensor_amax": ONE.bfloat16()},
        "tensor_amax must be a float32 scalar, got torch.bfloat16 of shape []",
    ),
    "one amax of groups": (
        X,
        NVFP4_1X16,
        {"groups": ENDS, "scale_per_group": True, "tensor_amax": ONE},
        "tensor_amax must be [2] float32, one for each group, got torch.float32 of shape []",
    ),
    "one amax of a transform": (
        X,
        NVFP4_1X16,
        {"columnwise": True, "hadamard": True, "tensor_amax": ONE},
        TWO_AMAXES,
    ),
    "two amaxes": (X, NVFP4_1X16, {"tensor_amax": (ONE, ONE)}, TWO_AMAXES),
    "transformed fp8": (
        X,
        FP8_1X128,
        {"columnwise": True, "hadamard": True},
        "hadamard is for nvfp4_1x16, got fp8_1x128; leave it out",
    ),
    "transformed rows": (
        X,
        NVFP4_1X16,
        {"hadamard": True},
        "hadamard transforms the columnwise copy, which is not asked for; leave it out",
    ),
    "rounded fp8": (
        X,
        FP8_1X128,
        {"stochastic": ROUNDING},
        "stochastic is for nvfp4_1x16, got fp8_1x128; leave it out",
    ),
    "rounded squares": (
        X,
        NVFP4_16X16,
        {"stochastic": ROUNDING},
        "stochastic is for nvfp4_1x16, got nvfp4_16x16; leave it out",
    ),
    "rounded batch": (
        X[None],
        NVFP4_1X16,
        {"stochastic": ROUNDING},
        "x must be [M, K], got shape [1, 4, 32]; flatten its leading dims",
    ),
    "both copies of a part": (
        X,
        NVFP4_1X16,
        {"columnwise": True, "stochastic": ROUNDING._replace(start=(16, 0))},
        "start and grid of stochastic are those of one copy's blocks, and both are asked for; ask for one after the"
        " other, the columnwise one with stream + 1",
    ),
    "groups of squares": (
        X,
        FP8_128X128,
        {"groups": ENDS},
        "tokens in groups need blocks of one row, got fp8_128x128; take fp8_1x128 or nvfp4_1x16, the formats of"
        " activations",
    ),
    "groups of a batch": (
        X[None],
        FP8_1X128,
        {"groups": ENDS},
        "x must be [M, K], got shape [1, 4, 32]; flatten its leading dims",
    ),
    "ends": (
        X,
        FP8_1X128,
        {"groups": ends(3, 2)},
        "group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 2 after 3;"
        " pass the cumulative sum of the groups' sizes",
    ),
    "ends of nvfp4": (
        X,
        NVFP4_1X16,
        {"groups": ends(3, 5)},
        "group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 5 after 3;"
        " pass the cumulative sum of the groups' sizes",
    ),
    "ends in int64": (
        X,
        FP8_1X128,
        {"groups": torch.tensor([4])},
        "group_ends must be int32, got torch.int64; use group_ends.int()",
    ),
    "ends elsewhere": (
        X,
        FP8_1X128,
        {"groups": ENDS.to("meta")},
        "group_ends must be on the tokens' device cpu, got meta; move it",
    ),
    "backend without an implementation": (
        X,
        FP8_1X128,
        {"backend": "cublas", "columnwise": True},
        "backend cublas has no implementation; choose one of gluon, triton, reference, or auto",
    ),
    "backend that cannot run": (
        X,
        FP8_1X128,
        {"backend": "triton"},
        f"backend triton cannot run: {NO_KERNEL_DEVICE}; choose another, or auto",
    ),
}


@pytest.mark.parametrize(("x", "fmt", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(x, fmt, options, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(TypeError if "cast it" in message or "int32, got" in message else ValueError) as error:
        ops.quantize(x, fmt, **options)
    assert str(error.value) == f"quantize: {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"fmt": "fp8"}, "no block format 'fp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16"),
        (
            {"backend": "cuda"},
            "no backend 'cuda'; the backends are auto, reference, triton, cublas, gluon, deep_gemm, cutlass;"
            " did you mean 'cublas'?",
        ),
        ({"stochastic": StochasticRounding(-1, 0, 0)}, "stochastic: seed must be from 0 to 2^64 - 1, got -1"),
    ),
    ids=("format", "backend", "seed"),
)
def test_refuses_what_is_unknown(options, message):
    with pytest.raises(ValueError) as error:
        ops.quantize(X, **{"fmt": NVFP4_1X16} | options)
    assert str(error.value) == message
