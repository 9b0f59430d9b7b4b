"""The refusals of ops.matmul and ops.grouped_matmul, and their words."""

from __future__ import annotations

import pytest
import torch
from grouped_products import PAIRS, Case

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal


def quantized(*shape, fmt=FP8_1X128, device="cpu"):
    return ops.quantize(torch.ones(*shape, device=device), fmt, backend="reference").rowwise


def square(*shape, **options):
    return quantized(*shape, fmt=FP8_128X128, **options)


A, B, EXPERTS = quantized(4, 32), quantized(8, 32), square(3, 8, 32)
AK, BK = quantized(8, 256), quantized(16, 256)
ENDS = torch.tensor([1, 1, 4], dtype=torch.int32)
SCALED = quantized(4, 32, fmt=NVFP4_1X16)._replace(global_scale=torch.ones(2))


def multiply(a=A, b=B, out_dtype=torch.float32, **options):
    return ops.matmul(a, b, out_dtype=out_dtype, **options)


def by_groups(a=A, b=EXPERTS, ends=ENDS, out_dtype=torch.float32, **options):
    return ops.grouped_matmul(a, b, ends, out_dtype=out_dtype, **options)


# message: (call, its options)
REFUSALS = {
    TypeError: {
        "matmul: a must be a result of quantize, got Tensor; quantize it first": (multiply, {"a": torch.ones(4, 32)}),
        "matmul: b must be a result of quantize, got tuple; quantize it first": (multiply, {"b": tuple(B)}),
        "matmul: out_dtype must be bfloat16, float16 or float32, got torch.float64": (
            multiply, {"out_dtype": torch.float64},
        ),
        "grouped_matmul: out_dtype must be bfloat16, float16 or float32, got torch.int32": (
            by_groups, {"out_dtype": torch.int32},
        ),
        "grouped_matmul: group_ends must be int32, got torch.int64; use group_ends.int()": (
            by_groups, {"ends": ENDS.long()},
        ),
    },
    ValueError: {
        "matmul: a must be a matrix, got payload of shape [2, 4, 32]": (multiply, {"a": quantized(2, 4, 32)}),
        "matmul: fp8_1x128 · nvfp4_1x16 differ in element or block length along the contraction": (
            multiply, {"b": quantized(4, 32, fmt=NVFP4_1X16)},
        ),
        "matmul: a [M, K] and b [N, K] must agree in K, got payloads [4, 32] and [8, 64]": (
            multiply, {"b": quantized(8, 64)},
        ),
        "matmul: a is on cpu, b on meta; move one of them": (multiply, {"b": quantized(8, 32, device="meta")}),
        "matmul: global_scale of a must be a scalar, got shape [2]; use grouped_matmul": (
            multiply, {"a": SCALED, "b": quantized(8, 32, fmt=NVFP4_1X16)},
        ),
        "matmul: bias must be a float vector of 8 elements, got torch.float32 of shape [1, 8]": (
            multiply, {"bias": torch.ones(1, 8)},
        ),
        "matmul: bias must be a float vector of 8 elements, got torch.int32 of shape [8]": (
            multiply, {"bias": torch.ones(8, dtype=torch.int32)},
        ),
        "matmul: backend cublas cannot run: cuBLASLt needs a CUDA device, got cpu; choose another, or auto": (
            multiply, {"backend": "cublas"},
        ),
        "grouped_matmul: backend cublas has no implementation; choose one of gluon, cutlass, triton, reference, or"
        " auto": (by_groups, {"backend": "cublas"}),
        "grouped_matmul: backend gluon cannot run: the kernels are for Hopper GPUs (sm_90), got cpu; choose another,"
        " or auto": (by_groups, {"backend": "gluon"}),
        'grouped_matmul: along must be "m" (groups of rows) or "k" (groups of the contraction), got \'n\'': (
            by_groups, {"along": "n"},
        ),
        "grouped_matmul: fp8_1x128 · nvfp4_16x16 differ in element or block length along the contraction": (
            by_groups, {"b": quantized(3, 8, 32, fmt=NVFP4_16X16)},
        ),
        'grouped_matmul: along "m", a must have one-row blocks, because groups may end at any row,'
        " got fp8_128x128; quantize a in a format with one-row blocks": (by_groups, {"a": square(4, 32)}),
        'grouped_matmul: along "m" a must be [M, K], got payload of shape [2, 4, 32]': (
            by_groups, {"a": quantized(2, 4, 32)},
        ),
        'grouped_matmul: along "m" b must be [E, N, K], got payload of shape [8, 32]': (
            by_groups, {"b": square(8, 32)},
        ),
        'grouped_matmul: along "k" b must be [K, P], got payload of shape [3, 16, 256]': (
            by_groups, {"a": AK, "b": quantized(3, 16, 256), "along": "k"},
        ),
        "grouped_matmul: a and b must agree in their last dim, the contraction, got payloads [4, 32] and"
        " [3, 8, 64]": (
            by_groups, {"b": square(3, 8, 64)},
        ),
        'grouped_matmul: along "k" tokens are padded to whole blocks of 128, got payloads of 200 columns; quantize a'
        " and b with groups=..., columnwise=True": (
            by_groups, {"a": quantized(8, 200), "b": quantized(16, 200), "along": "k"},
        ),
        "grouped_matmul: group_ends must be on the tokens' device cpu, got meta; move it": (
            by_groups, {"ends": ENDS.to("meta")},
        ),
        "grouped_matmul: group_ends must have one end for each matrix of b [E, N, K], got 2 ends for payload of shape"
        " [3, 8, 32]": (by_groups, {"ends": ENDS[:2]}),
        "grouped_matmul: global_scale of a must be a scalar or one for each group, got [2] for 3 ends": (
            by_groups, {"a": SCALED, "b": quantized(3, 8, 32, fmt=NVFP4_16X16)},
        ),
    },
}  # fmt: skip
ALL_REFUSALS = [(kind, message, *call) for kind, calls in REFUSALS.items() for message, call in calls.items()]


@pytest.mark.parametrize(
    ("kind", "message", "call", "options"), ALL_REFUSALS, ids=[row[1][:60] for row in ALL_REFUSALS]
)
def test_refuses(kind, message, call, options):
    with pytest.raises(kind) as error:
        call(**options)
    assert str(error.value) == message


SUMS = {
    "plain": (Case("", PAIRS[""][1], ([4], 0), "cpu", 6, 32), r"add_matmul_: .* of shape \[4, 6\]", (4, 6)),
    "grouped": (Case("k", PAIRS["k"][0], ([3, 0], 0), "cpu", 4, 6), r"add_grouped_matmul_: .* \[2, 4, 6\]", (2, 4, 6)),
}


@pytest.mark.parametrize(("case", "message", "shape"), SUMS.values(), ids=SUMS)
def test_a_sum_must_be_contiguous_float32_of_the_shape(case, message, shape):
    zeros = torch.zeros(shape)
    for out in (zeros.bfloat16(), zeros.mT.contiguous(), zeros.mT.contiguous().mT, torch.zeros(3, *shape[1:])):
        with pytest.raises(ValueError, match=message.replace("_: ", "_: out must be a contiguous float32 tensor", 1)):
            case.add(out)


@pytest.mark.parametrize(("ends", "bad"), (([10, 4, 30], 1), ([10, 31, 31], 1), ([-1, 10, 20], 0)), ids=str)
def test_values_are_checked_on_a_cpu(ends, bad):
    case = Case("m", PAIRS["m"][0], ([10, 10, 10], 0), "cpu")
    case.ends = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"grouped_matmul: group_ends must not decrease .* group_ends\[{bad}\]"):
        case.run()


def test_a_pair_without_a_kernel_is_refused_by_name_and_computed_by_auto(device):
    a, b = square(128, 32, device=device), quantized(8, 32, device=device)
    if ops.backend.why_no_triton(torch.device(device)) is None:
        with pytest.raises(ValueError, match=r"cannot run: fp8_128x128 · fp8_1x128 has no kernel; choose another"):
            multiply(a, b, backend="triton")
    assert_bitwise_equal(multiply(a, b), multiply(a, b, backend="reference"))
