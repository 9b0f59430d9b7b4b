"""What ops.grouped_matmul refuses, and with which words."""

from __future__ import annotations

import pytest
import torch
from grouped_products import PAIRS, Case

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_16X16


def quantized(*shape, fmt=FP8_1X128, device="cpu"):
    return ops.quantize(torch.ones(*shape, device=device), fmt, backend="reference").rowwise


A, B = quantized(4, 32), quantized(3, 8, 32, fmt=FP8_128X128)
AK, BK = quantized(8, 256), quantized(16, 256)
ENDS = torch.tensor([1, 1, 4], dtype=torch.int32)


def multiply(a=A, b=B, ends=ENDS, out_dtype=torch.float32, **options):
    return ops.grouped_matmul(a, b, ends, out_dtype=out_dtype, **options)


REFUSALS = {
    "tensor": (
        lambda: multiply(a=torch.ones(4, 32)),
        TypeError("grouped_matmul: a must be a result of quantize, got Tensor; quantize it first"),
    ),
    "out_dtype": (
        lambda: multiply(out_dtype=torch.int32),
        TypeError("grouped_matmul: out_dtype must be bfloat16, float16 or float32, got torch.int32"),
    ),
    "along": (
        lambda: multiply(along="n"),
        ValueError(
            'grouped_matmul: along must be "m" (groups of rows) or "k" (groups of the contraction), got \'n\''
        ),
    ),
    "formats": (
        lambda: multiply(b=quantized(3, 8, 32, fmt=NVFP4_16X16)),
        ValueError(
            "grouped_matmul: fp8_1x128 · nvfp4_16x16 differ in element or block length along the contraction"
        ),
    ),
    "square a": (
        lambda: multiply(a=quantized(4, 32, fmt=FP8_128X128)),
        ValueError(
            'grouped_matmul: along "m" groups end anywhere, and would cut blocks of 128 rows; quantize a in one-row'
            " blocks, got fp8_128x128"
        ),
    ),
    "square b along k": (
        lambda: multiply(a=AK, b=quantized(16, 256, fmt=FP8_128X128), along="k"),
        ValueError(
            'grouped_matmul: along "k" groups end anywhere, and would cut blocks of 128 rows; quantize b in one-row'
            " blocks, got fp8_128x128"
        ),
    ),
    "dims of a": (
        lambda: multiply(a=quantized(2, 4, 32)),
        ValueError('grouped_matmul: along "m" a must be [M, K], got payload of shape [2, 4, 32]'),
    ),
    "dims of b": (
        lambda: multiply(b=quantized(8, 32, fmt=FP8_128X128)),
        ValueError('grouped_matmul: along "m" b must be [E, N, K], got payload of shape [8, 32]'),
    ),
    "dims of b along k": (
        lambda: multiply(a=AK, b=quantized(3, 16, 256), along="k"),
        ValueError('grouped_matmul: along "k" b must be [K, P], got payload of shape [3, 16, 256]'),
    ),
    "K": (
        lambda: multiply(b=quantized(3, 8, 64, fmt=FP8_128X128)),
        ValueError(
            "grouped_matmul: a and b must agree in their last dim, the contraction, got payloads [4, 32] and"
            " [3, 8, 64]"
        ),
    ),
    "no whole blocks": (
        lambda: multiply(a=quantized(8, 200), b=quantized(16, 200), along="k"),
        ValueError(
            'grouped_matmul: along "k" tokens are padded to whole blocks of 128, got payloads of 200 columns; quantize'
            " a and b with groups=..., columnwise=True"
        ),
    ),
    "devices": (
        lambda: multiply(b=quantized(3, 8, 32, fmt=FP8_128X128, device="meta")),
        ValueError("grouped_matmul: a is on cpu, b on meta; move one of them"),
    ),
    "number of ends": (
        lambda: multiply(ends=ENDS[:2]),
        ValueError(
            "grouped_matmul: group_ends must have one end for each matrix of b [E, N, K], got 2 ends for payload of"
            " shape [3, 8, 32]"
        ),
    ),
    "dtype of ends": (
        lambda: multiply(ends=ENDS.long()),
        TypeError("grouped_matmul: group_ends must be int32, got torch.int64; use group_ends.int()"),
    ),
    "cublas": (
        lambda: multiply(backend="cublas"),
        ValueError(
            "grouped_matmul: backend cublas has no implementation; choose one of gluon,"
            " cutlass, triton, reference, or auto"
        ),
    ),
    "gluon on a CPU": (
        lambda: multiply(backend="gluon"),
        ValueError(
            "grouped_matmul: backend gluon cannot run: the kernels are for Hopper GPUs (sm_90), got cpu; choose"
            " another, or auto"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, expected):
    with pytest.raises(type(expected)) as error:
        call()
    assert str(error.value) == str(expected)


def test_ends_on_another_device_are_refused():
    with pytest.raises(ValueError, match="group_ends must be on the tokens' device cpu, got meta"):
        multiply(ends=ENDS.to("meta"))


@pytest.mark.parametrize(
    "out",
    (torch.zeros(2, 4, 6, dtype=torch.bfloat16), torch.zeros(2, 6, 4), torch.zeros(2, 6, 4).mT, torch.zeros(3, 4, 6)),
    ids=("dtype", "shape", "strides", "groups"),
)
def test_add_grouped_matmul_refuses(out):
    case = Case("k", PAIRS["k"][0], ([3, 0], 0), "cpu", 4, 6)
    with pytest.raises(
        ValueError,
        match=r"add_grouped_matmul_: out must be a contiguous float32 tensor of shape \[2, 4, 6\] on cpu, got",
    ):
        case.add(out)


MALFORMED = {
    "decreasing": ([10, 4, 30], 1),
    "beyond": ([10, 31, 31], 1),
    "negative": ([-1, 10, 20], 0),
}


@pytest.mark.parametrize(("ends", "bad"), MALFORMED.values(), ids=MALFORMED)
def test_values_are_checked_on_a_cpu(ends, bad):
    case = Case("m", PAIRS["m"][0], ([10, 10, 10], 0), "cpu")
    case.ends = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"grouped_matmul: group_ends must not decrease .* group_ends\[{bad}\]"):
        case.run()
