"""Refusals of operations, with their words: what is wrong, what was given, how to fix it."""

import pytest
import torch
from expecttest import assert_expected_inline

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    CastOptions,
    StochasticRounding,
)
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.testing import assert_bitwise_equal

X, ONE, TWO = torch.ones(4, 32), torch.ones(()), torch.ones(2)
ROUNDING = StochasticRounding(1, 2, 3)
PART = ROUNDING._replace(start=(16, 0))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def messages(calls) -> str:
    """The error of each call, a line each."""
    lines = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        lines.append(f"{error.type.__name__} {error.value}\n")
    return "".join(lines)


QUANTIZE = [
    (X.double(), FP8_1X128, {}),
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
    (X, NVFP4_16X16, {"stochastic": ROUNDING}),
    (X[None], NVFP4_1X16, {"stochastic": ROUNDING}),
    (X, NVFP4_1X16, {"columnwise": True, "stochastic": PART}),
    (X, NVFP4_1X16, {"stochastic": StochasticRounding(-1, 0, 0)}),
    # Groups.
    (X, FP8_128X128, {"groups": ends(1, 4)}),
    (X[None], FP8_1X128, {"groups": ends(1, 4)}),
    (X, FP8_1X128, {"groups": ends(3, 2)}),
    # Backends.
    (X, FP8_1X128, {"backend": "cuda"}),
    (X, FP8_1X128, {"backend": "cublas", "columnwise": True}),
    (X, FP8_1X128, {"backend": "triton"}),
]


def test_quantize(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert_expected_inline(
        messages(lambda x=x, fmt=fmt, options=options: ops.quantize(x, fmt, **options) for x, fmt, options in QUANTIZE),
        """\
TypeError quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first
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
ValueError quantize: stochastic is for nvfp4_1x16, got nvfp4_16x16; leave it out
ValueError quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims
ValueError quantize: start and grid of stochastic refer to the blocks of one copy, but both copies are requested; request them in separate calls, the columnwise one with stream + 1
ValueError stochastic: seed must be from 0 to 2^64 - 1, got -1
ValueError quantize: tokens in groups need a format with one-row blocks, got fp8_128x128; use fp8_1x128 or nvfp4_1x16, the formats of activations
ValueError quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims
ValueError quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 2 after 3; pass the cumulative sum of the groups' sizes
ValueError unknown backend 'cuda'; the backends are auto, reference, triton, cublas, gluon, deep_gemm, cutlass; did you mean 'cublas'?
ValueError quantize: backend cublas has no implementation; choose one of gluon, triton, reference, or auto
ValueError quantize: backend triton cannot run: Triton kernels need a CUDA device, got cpu (TRITON_INTERPRET=1 interprets them on a CPU); choose another, or auto
""",  # noqa: E501
    )


def quantized(*shape, fmt=FP8_1X128, device="cpu"):
    return ops.quantize(torch.ones(*shape, device=device), fmt, backend="reference").rowwise


def square(*shape, **options):
    return quantized(*shape, fmt=FP8_128X128, **options)


A, B, EXPERTS = quantized(4, 32), quantized(8, 32), square(3, 8, 32)
AK, BK = quantized(8, 256), quantized(16, 256)
ENDS = ends(1, 1, 4)
NVFP4, NVFP4_SQUARE = quantized(4, 32, fmt=NVFP4_1X16), quantized(4, 32, fmt=NVFP4_16X16)
SCALED = NVFP4._replace(global_scale=TWO)
SUM = torch.zeros(4, 8)


def test_dequantize_and_transpose():
    calls = [
        *(lambda op=op, x=x: op(x) for op in (ops.dequantize, ops.transpose) for x in (X, tuple(A))),
        lambda: ops.dequantize(A, dtype=torch.int32),
        lambda: ops.dequantize(A._replace(format_name="fp8")),
        lambda: ops.dequantize(A, columns=31),
        lambda: ops.dequantize(NVFP4, columns=30),
        lambda: ops.dequantize(SCALED),
        lambda: ops.transpose(NVFP4_SQUARE, columns=30),
        lambda: ops.transpose(NVFP4_SQUARE, backend="cublas"),
        lambda: ops.transpose(NVFP4),
    ]
    assert_expected_inline(
        messages(calls),
        """\
TypeError dequantize: x must be a result of quantize, got Tensor; quantize it first
TypeError dequantize: x must be a result of quantize, got tuple; quantize it first
TypeError transpose: x must be a result of quantize, got Tensor; quantize it first
TypeError transpose: x must be a result of quantize, got tuple; quantize it first
TypeError dequantize: dtype must be bfloat16, float16, float32 or float64, got torch.int32
ValueError dequantize: x has unknown format 'fp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16
ValueError dequantize: the payload has 32 columns, got columns=31
ValueError dequantize: the payload has 32 columns, got columns=30
ValueError dequantize: global_scale must be a scalar or have one value for each matrix of x, got [2] for payload of shape [4, 16]; for tokens in groups, dequantize the rows of each group with its own scale
ValueError transpose: columns=30 does not match a payload of shape [4, 16]
ValueError transpose: backend cublas has no implementation; choose one of triton, reference, or auto
ValueError transpose: blocks must be square, got 1x16 (nvfp4_1x16), whose transpose needs other scales; quantize the high-precision tensor with columnwise=True
""",  # noqa: E501
    )


def multiply(a=A, b=B, out_dtype=torch.float32, **options):
    return ops.matmul(a, b, out_dtype=out_dtype, **options)


def by_groups(a=A, b=EXPERTS, group_ends=ENDS, out_dtype=torch.float32, **options):
    return ops.grouped_matmul(a, b, group_ends, out_dtype=out_dtype, **options)


def test_gemms():
    experts_in_nvfp4 = quantized(3, 8, 32, fmt=NVFP4_16X16)
    calls = [
        lambda: multiply(a=X),
        lambda: multiply(b=tuple(B)),
        lambda: multiply(a=quantized(2, 4, 32)),
        lambda: multiply(b=NVFP4),
        lambda: multiply(b=quantized(8, 64)),
        lambda: multiply(b=quantized(8, 32, device="meta")),
        lambda: multiply(a=SCALED, b=quantized(8, 32, fmt=NVFP4_1X16)),
        lambda: multiply(out_dtype=torch.float64),
        lambda: multiply(bias=torch.ones(1, 8)),
        lambda: multiply(bias=torch.ones(8, dtype=torch.int32)),
        lambda: multiply(backend="cublas"),
        # Groups.
        lambda: by_groups(out_dtype=torch.int32),
        lambda: by_groups(backend="cublas"),
        lambda: by_groups(backend="gluon"),
        lambda: by_groups(along="n"),
        lambda: by_groups(b=experts_in_nvfp4),
        lambda: by_groups(a=square(4, 32)),
        lambda: by_groups(a=quantized(2, 4, 32)),
        lambda: by_groups(b=square(8, 32)),
        lambda: by_groups(AK, quantized(3, 16, 256), along="k"),
        lambda: by_groups(b=square(3, 8, 64)),
        lambda: by_groups(quantized(8, 200), quantized(16, 200), along="k"),
        lambda: by_groups(group_ends=ENDS[:2]),
        lambda: by_groups(group_ends=ends(1, 0, 4)),
        lambda: by_groups(SCALED, experts_in_nvfp4),
        # Sums: float32 of the shape, contiguous.
        *(
            lambda out=out: ops.add_matmul_(out, A, B)
            for out in (SUM.bfloat16(), SUM.mT.contiguous(), SUM.mT.contiguous().mT)
        ),
        lambda: ops.add_grouped_matmul_(torch.zeros(3, 8, 16).bfloat16(), AK, BK, ENDS),
    ]
    assert_expected_inline(
        messages(calls),
        """\
TypeError matmul: a must be a result of quantize, got Tensor; quantize it first
TypeError matmul: b must be a result of quantize, got tuple; quantize it first
ValueError matmul: a must be a matrix, got payload of shape [2, 4, 32]
ValueError matmul: fp8_1x128 · nvfp4_1x16 differ in element or block length along the contraction
ValueError matmul: a [M, K] and b [N, K] must agree in K, got payloads [4, 32] and [8, 64]
ValueError matmul: a is on cpu, b on meta; move one of them
ValueError matmul: global_scale of a must be a scalar, got shape [2]; use grouped_matmul
TypeError matmul: out_dtype must be bfloat16, float16 or float32, got torch.float64
ValueError matmul: bias must be a float vector of 8 elements, got torch.float32 of shape [1, 8]
ValueError matmul: bias must be a float vector of 8 elements, got torch.int32 of shape [8]
ValueError matmul: backend cublas cannot run: cuBLASLt needs a CUDA device, got cpu; choose another, or auto
TypeError grouped_matmul: out_dtype must be bfloat16, float16 or float32, got torch.int32
ValueError grouped_matmul: backend cublas has no implementation; choose one of gluon, cutlass, triton, reference, or auto
ValueError grouped_matmul: backend gluon cannot run: the kernels are for Hopper GPUs (sm_90), got cpu; choose another, or auto
ValueError grouped_matmul: along must be "m" (groups of rows) or "k" (groups of the contraction), got 'n'
ValueError grouped_matmul: fp8_1x128 · nvfp4_16x16 differ in element or block length along the contraction
ValueError grouped_matmul: along "m", a must have one-row blocks, because groups may end at any row, got fp8_128x128; quantize a in a format with one-row blocks
ValueError grouped_matmul: along "m" a must be [M, K], got payload of shape [2, 4, 32]
ValueError grouped_matmul: along "m" b must be [E, N, K], got payload of shape [8, 32]
ValueError grouped_matmul: along "k" b must be [K, P], got payload of shape [3, 16, 256]
ValueError grouped_matmul: a and b must agree in their last dim, the contraction, got payloads [4, 32] and [3, 8, 64]
ValueError grouped_matmul: along "k" tokens are padded to whole blocks of 128, got payloads of 200 columns; quantize a and b with groups=..., columnwise=True
ValueError grouped_matmul: group_ends must have one end for each matrix of b [E, N, K], got 2 ends for payload of shape [3, 8, 32]
ValueError grouped_matmul: group_ends must not decrease and must lie in [0, 4], the number of tokens, got group_ends[1] = 0 after 1; pass the cumulative sum of the groups' sizes
ValueError grouped_matmul: global_scale of a must be a scalar or one for each group, got [2] for 3 ends
ValueError add_matmul_: out must be a contiguous float32 tensor of shape [4, 8] on cpu, got torch.bfloat16 of shape [4, 8] on cpu
ValueError add_matmul_: out must be a contiguous float32 tensor of shape [4, 8] on cpu, got torch.float32 of shape [8, 4] on cpu
ValueError add_matmul_: out must be a contiguous float32 tensor of shape [4, 8] on cpu, got torch.float32 of shape [4, 8] on cpu, not contiguous
ValueError add_grouped_matmul_: out must be a contiguous float32 tensor of shape [3, 8, 16] on cpu, got torch.bfloat16 of shape [3, 8, 16] on cpu
""",  # noqa: E501
    )


def test_a_pair_without_a_kernel_is_refused_by_name_and_computed_by_auto(device):
    a, b = square(128, 32, device=device), quantized(8, 32, device=device)
    if ops.backend.why_no_triton(torch.device(device)) is None:
        with pytest.raises(ValueError, match=r"cannot run: fp8_128x128 · fp8_1x128 has no kernel; choose another"):
            multiply(a, b, backend="triton")
    assert_bitwise_equal(multiply(a, b), multiply(a, b, backend="reference"))


NORM = ops.Norm(X, None, None, None, torch.ones(4), X.dtype)
ROWWISE = CastOptions(FP8_1X128)


def test_fused():
    calls = [
        lambda: ops.norm_statistics(X, "batch", 1e-5),
        lambda: ops.norm_statistics(X[None], "rms", 1e-5),
        lambda: ops.norm_quantize(NORM._replace(x=X.double()), ROWWISE),
        lambda: ops.norm_quantize(NORM._replace(weight=torch.ones(31)), ROWWISE),
        lambda: ops.normalize(NORM._replace(rstd=torch.ones(4, 1))),
        lambda: ops.norm_quantize(NORM, CastOptions(NVFP4_1X16, power_of_2_scales=True)),
        lambda: ops.swiglu(X, X[:, 1:]),
        lambda: ops.swiglu_quantize(X, X.bfloat16(), ROWWISE),
        lambda: ops.swiglu_backward(X.double(), X, X),
    ]
    assert_expected_inline(
        messages(calls),
        """\
ValueError norm_statistics: kind must be rms or layer, got 'batch'
ValueError norm_statistics: x must be [M, K], got shape [1, 4, 32]; reshape it
TypeError norm_quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first
ValueError norm_quantize: weight must be [32] for x [4, 32], got shape [31]
ValueError normalize: rstd must be [4] for x [4, 32], got shape [4, 1]
ValueError quantize: nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn
ValueError swiglu: gate and up must agree in shape, got [4, 32] and [4, 31]
TypeError swiglu_quantize: gate and up must have one dtype, got torch.float32 and torch.bfloat16
TypeError swiglu_backward: dh must be bfloat16, float16 or float32, got torch.float64; cast it first
""",
    )


def test_groups():
    calls = [
        lambda: ops.make_groups(ends(3), 5, FP8_128X128),
        lambda: ops.make_groups(ends(6), 5, FP8_1X128),
        *(
            lambda given=given: check_group_ends("op", given, 9, torch.device("cpu"))
            for given in (
                torch.tensor([1, 2]), ends(1, 2)[None], ends(),
                ends(1, 1, 2, 2)[::2], ends(1, 2).to("meta"), ends(-1, 2), ends(1, 5, 5, 4, 3), ends(1, 5, 10, 12),
            )
        ),
        # Without values only the rest is checked.
        lambda: check_group_ends("op", torch.tensor([5, 4], device="meta"), 3, torch.device("meta")),
    ]  # fmt: skip
    check_group_ends("op", ends(5, 4).to("meta"), 3, torch.device("meta"))
    assert_expected_inline(
        messages(calls),
        """\
ValueError make_groups: tokens in groups need a format with one-row blocks, got fp8_128x128; use fp8_1x128 or nvfp4_1x16, the formats of activations
ValueError make_groups: group_ends must not decrease and must lie in [0, 5], the number of tokens, got group_ends[0] = 6 after 0; pass the cumulative sum of the groups' sizes
TypeError op: group_ends must be int32, got torch.int64; use group_ends.int()
ValueError op: group_ends must be [E] with at least one group, got shape [1, 2]
ValueError op: group_ends must be [E] with at least one group, got shape [0]
ValueError op: group_ends must be contiguous, got stride (2,); use .contiguous()
ValueError op: group_ends must be on the tokens' device cpu, got meta; move it
ValueError op: group_ends must not decrease and must lie in [0, 9], the number of tokens, got group_ends[0] = -1 after 0; pass the cumulative sum of the groups' sizes
ValueError op: group_ends must not decrease and must lie in [0, 9], the number of tokens, got group_ends[3] = 4 after 5; pass the cumulative sum of the groups' sizes
ValueError op: group_ends must not decrease and must lie in [0, 9], the number of tokens, got group_ends[2] = 10 after 5; pass the cumulative sum of the groups' sizes
TypeError op: group_ends must be int32, got torch.int64; use group_ends.int()
""",  # noqa: E501
    )


Y, IDS, SOURCE, WEIGHTS = torch.zeros(8, 8), torch.zeros(4, 2, dtype=torch.int64), torch.arange(8).int(), SUM[:, :2]


def test_permutation():
    calls = [
        lambda: ops.permute(X.int(), IDS, 2),
        lambda: ops.permute(X, IDS.float(), 2),
        lambda: ops.permute(X, IDS[:3], 2),
        lambda: ops.permute(X, IDS[:, 0], 2),
        lambda: ops.permute(X, IDS.to("meta"), 2),
        lambda: ops.unpermute(Y, SOURCE, 0),
        lambda: ops.unpermute(Y, SOURCE[:6], 2),
        lambda: ops.unpermute(Y, SOURCE.long(), 2),
        lambda: ops.unpermute(Y, SOURCE, 2, WEIGHTS.t()),
        lambda: ops.unpermute(Y, SOURCE, 2, WEIGHTS.to("meta")),
        lambda: ops.unpermute_backward(X, None, SOURCE, 1),
    ]
    assert_expected_inline(
        messages(calls),
        """\
TypeError permute: x must be bfloat16, float16 or float32, got torch.int32; cast it first
TypeError permute: expert_ids must be int32 or int64, got torch.float32; cast them
ValueError permute: x [T, H] and expert_ids [T, top_k], top_k >= 1, must agree in T, got [4, 32] and [3, 2]
ValueError permute: x [T, H] and expert_ids [T, top_k], top_k >= 1, must agree in T, got [4, 32] and [4]
ValueError permute: x is on cpu, expert_ids on meta; move one of them
ValueError unpermute: y must be [T · top_k, H] for T=8, top_k=0, got [8, 8]
ValueError unpermute: y must be [T · top_k, H] for T=3, top_k=2, got [8, 8]
ValueError unpermute: source must be int32 [T · top_k] on cpu, as permute returns it, got torch.int64 [8] on cpu with T=4 and top_k=2
ValueError unpermute: weights must be [T, top_k] = [4, 2] on cpu, got [2, 4] on cpu
ValueError unpermute: weights must be [T, top_k] = [4, 2] on cpu, got [4, 2] on meta
ValueError unpermute_backward: source must be int32 [T · top_k] on cpu, as permute returns it, got torch.int32 [8] on cpu with T=4 and top_k=1
""",  # noqa: E501
    )
