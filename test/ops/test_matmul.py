"""ops.matmul against the fp64 product of the decoded operands, within an error budget; noise; refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from product_budgets import accumulation_unit, assert_within_budget, out_dtypes, pair_id
from rounding_noise import accumulation, assert_noise_is_expected, rounded

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

FP8, NVFP4 = (FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)
ALL_PAIRS = (*itertools.product(FP8, FP8), *itertools.product(NVFP4, NVFP4))
# An operand with square blocks comes second: nothing in training has it first, and only the reference computes that.
KERNEL_PAIRS = tuple(pair for pair in ALL_PAIRS if pair[0].block[0] == 1)
# (M, N, K): empty in each dim, one element, one block, ragged in each dim, odd K, several blocks.
PRODUCTS = (
    (0, 16, 128), (16, 0, 128), (16, 16, 0), (0, 0, 0), (1, 1, 1), (1, 16, 128), (16, 1, 16), (128, 128, 128),
    (33, 47, 65), (63, 100, 500), (130, 129, 257), (64, 32, 592),
)  # fmt: skip


def product_id(product) -> str:
    return "M{}N{}K{}".format(*product)


pairs = pytest.mark.parametrize("pair", KERNEL_PAIRS, ids=pair_id)
products = pytest.mark.parametrize("product", PRODUCTS, ids=product_id)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))


def inputs(product, device="cpu", scale: float = 2.0**-6) -> tuple[torch.Tensor, torch.Tensor]:
    """High-precision a [M, K] and b [N, K]; their products stay within fp16."""
    m, n, k = product
    return random_tensor(m, k, seed=1, device=device) * scale, random_tensor(n, k, seed=2, device=device) * scale


def quantize_pair(a, b, pair):
    return tuple(ops.quantize(x, fmt, backend="reference").rowwise for x, fmt in zip((a, b), pair))


# --- error budgets ----------------------------------------------------------------------------------------------------


@backends
@products
@pairs
def test_shapes(pair, product, backend, device):
    a, b = quantize_pair(*inputs(product, device), pair)
    out = ops.matmul(a, b, out_dtype=torch.float32, backend=backend)
    assert out.is_contiguous() and out.dtype is torch.float32
    assert_within_budget(out, a, b, product[2], accumulation_unit(backend, pair[0], device))


@products
@pytest.mark.parametrize("pair", [p for p in ALL_PAIRS if p not in KERNEL_PAIRS], ids=pair_id)
def test_reference_multiplies_square_blocks_first_too(pair, product):
    a, b = quantize_pair(*inputs(product), pair)
    out = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert_within_budget(out, a, b, product[2], 2.0**-24)


@backends
@out_dtypes
@pairs
def test_rounds_to_out_dtype(pair, out_dtype, backend, device):
    a, b = quantize_pair(*inputs((70, 40, 300), device), pair)
    out = ops.matmul(a, b, out_dtype=out_dtype, backend=backend)
    assert out.dtype is out_dtype
    assert_within_budget(out, a, b, 300, accumulation_unit(backend, pair[0], device))


@backends
@pytest.mark.parametrize(
    ("out_dtype", "bias_dtype"),
    ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)),
    ids=("bfloat16_of_float32", "float16_of_bfloat16", "float32_of_float16"),
)
@pairs
def test_bias_is_added_before_the_only_rounding(pair, bias_dtype, out_dtype, backend, device):
    a, b = quantize_pair(*inputs((37, 40, 200), device), pair)
    bias = torch.linspace(-9, 9, 40, device=device).to(bias_dtype)
    out = ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend=backend)
    assert out.dtype is out_dtype
    assert_within_budget(out, a, b, 200, accumulation_unit(backend, pair[0], device), bias)


@backends
@pairs
def test_empty_contraction_gives_zeros_and_bias(pair, backend, device):
    a, b = quantize_pair(*inputs((5, 7, 0), device), pair)
    bias = torch.arange(7.0, device=device)
    assert ops.matmul(a, b, out_dtype=torch.float32, backend=backend).tolist() == [[0.0] * 7] * 5
    assert ops.matmul(a, b, out_dtype=torch.float32, bias=bias, backend=backend).tolist() == [bias.tolist()] * 5


@backends
@out_dtypes
@pairs
def test_zeros_multiply_to_zeros(pair, out_dtype, backend, device):
    a, b = quantize_pair(*inputs((5, 7, 40), device), pair)
    zeros = ops.quantize(torch.zeros(5, 40, device=device), pair[0], backend="reference").rowwise
    assert (ops.matmul(zeros, b, out_dtype=out_dtype, backend=backend) == 0).all()
    assert (ops.matmul(a, b, out_dtype=out_dtype, backend=backend) != 0).any()


@backends
@pairs
def test_small_integers_multiply_exactly(pair, backend, device):
    values = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, -4.0], device=device)
    generator = torch.Generator().manual_seed(0)
    a, b = (values[torch.randint(0, 6, (n, 256), generator=generator).to(device)] for n in (48, 32))
    # An amax of 448 = 7 · 64 or 2688 makes all scales powers of two; it meets zeros in the other operand.
    top = 448.0 if pair[0].element is E4M3 else 6.0
    for x, other, column in ((a, b, 0), (b, a, 1)):
        block = pair[0].block[1]
        x[:, column::block], other[:, column::block] = top, 0.0
    out = ops.matmul(*quantize_pair(a, b, pair), out_dtype=torch.float32, backend=backend)
    if pair[0].element is E4M3:
        assert torch.equal(out, (a.double() @ b.double().mT).float())
    else:
        # global_scale = 6 / 2688 rounds.
        torch.testing.assert_close(out, (a.double() @ b.double().mT).float(), rtol=2.0**-21, atol=0)


@backends
@pytest.mark.parametrize("pair", [p for p in KERNEL_PAIRS if p[0].element is E4M3], ids=pair_id)
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
def test_fp8_nan_and_inf_reach_their_row_and_no_other(value, pair, backend, device):
    a, b = inputs((40, 300, 300), device)
    poisoned_a = a.clone()
    poisoned_a[7, 200] = value
    out = ops.matmul(*quantize_pair(poisoned_a, b, pair), out_dtype=torch.float32, backend=backend)
    assert out.isfinite().all(dim=1).nonzero().flatten().tolist() == [row for row in range(40) if row != 7]
    assert not out[7].isfinite().any()
    b[290, 299] = value
    out = ops.matmul(*quantize_pair(a, b, pair), out_dtype=torch.float32, backend=backend)
    block_rows = pair[1].block[0]
    hit = range(290 // block_rows * block_rows, min(290 // block_rows * block_rows + block_rows, 300))
    assert (~out.isfinite()).any(dim=0).nonzero().flatten().tolist() == list(hit)
    assert not out[:, hit.start : hit.stop].isfinite().any()


@backends
@pytest.mark.parametrize("pair", [p for p in KERNEL_PAIRS if p[0].element is not E4M3], ids=pair_id)
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
@pytest.mark.parametrize("operand", (0, 1), ids=("a", "b"))
def test_nvfp4_nan_and_inf_reach_the_whole_product(operand, value, pair, backend, device):
    x = inputs((20, 30, 40), device)
    x[operand][3, 5] = value
    out = ops.matmul(*quantize_pair(*x, pair), out_dtype=torch.bfloat16, backend=backend)
    assert out.isnan().all()


@backends
@pairs
def test_autocast_changes_nothing(pair, backend, device):
    a, b = quantize_pair(*inputs((40, 50, 300), device), pair)
    outside = ops.matmul(a, b, out_dtype=torch.float32, backend=backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = ops.matmul(a, b, out_dtype=torch.float32, backend=backend)
    assert_bitwise_equal(inside, outside)


# --- noise ------------------------------------------------------------------------------------------------------------


@pairs
def test_noise_is_that_of_the_formats(pair):
    """Against the product of the operands before they were quantized."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(256, 1024, generator=generator) for _ in range(2))
    out = ops.matmul(*quantize_pair(a, b, pair), out_dtype=torch.float32, backend="reference")
    assert_noise_is_expected("product", [(out, rounded(a, pair[0]), rounded(b, pair[1]))], accumulation("cpu", 1024))


# --- meta tensors and refusals ----------------------------------------------------------------------------------------


def quantized(*shape, fmt=FP8_1X128, device="cpu"):
    return ops.quantize(torch.ones(*shape, device=device), fmt, backend="reference").rowwise


A, B, A4 = quantized(4, 32), quantized(8, 32), quantized(4, 32, fmt=NVFP4_1X16)


def multiply(a=A, b=B, out_dtype=torch.float32, **options):
    return ops.matmul(a, b, out_dtype=out_dtype, **options)


REFUSALS = {
    "tensor": (
        lambda: multiply(a=torch.ones(4, 32)),
        TypeError("matmul: a must be a result of quantize, got Tensor; quantize it first"),
    ),
    "plain tuple": (
        lambda: multiply(b=tuple(B)),
        TypeError("matmul: b must be a result of quantize, got tuple; quantize it first"),
    ),
    "batch": (
        lambda: multiply(a=quantized(2, 4, 32)),
        ValueError("matmul: a must be a matrix, got payload of shape [2, 4, 32]"),
    ),
    "out_dtype": (
        lambda: multiply(out_dtype=torch.float64),
        TypeError("matmul: out_dtype must be bfloat16, float16 or float32, got torch.float64"),
    ),
    "formats": (
        lambda: multiply(b=A4),
        ValueError("matmul: fp8_1x128 · nvfp4_1x16 differ in element or block length along the contraction"),
    ),
    "K": (
        lambda: multiply(b=quantized(8, 64)),
        ValueError("matmul: a [M, K] and b [N, K] must agree in K, got payloads [4, 32] and [8, 64]"),
    ),
    "devices": (
        lambda: multiply(b=quantized(8, 32, device="meta")),
        ValueError("matmul: a is on cpu, b on meta; move one of them"),
    ),
    "bias length": (
        lambda: multiply(bias=torch.ones(4)),
        ValueError("matmul: bias must be a float vector of 8 elements, got torch.float32 of shape [4]"),
    ),
    "bias dims": (
        lambda: multiply(bias=torch.ones(1, 8)),
        ValueError("matmul: bias must be a float vector of 8 elements, got torch.float32 of shape [1, 8]"),
    ),
    "bias dtype": (
        lambda: multiply(bias=torch.ones(8, dtype=torch.int32)),
        ValueError("matmul: bias must be a float vector of 8 elements, got torch.int32 of shape [8]"),
    ),
    "unknown backend": (
        lambda: multiply(backend="none"),
        ValueError("no backend 'none'; the backends are auto, reference, triton, cublas, gluon, deep_gemm, cutlass"),
    ),
    "cublas on a CPU": (
        lambda: multiply(backend="cublas"),
        ValueError(
            "matmul: backend cublas cannot run: it needs a CUDA device, got cpu; choose another, or auto"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, expected):
    with pytest.raises(type(expected)) as error:
        call()
    assert str(error.value) == str(expected)


def test_a_pair_without_a_kernel_is_refused_by_name_and_computed_by_auto(device):
    a, b = quantized(128, 32, fmt=FP8_128X128, device=device), quantized(8, 32, device=device)
    if ops.backend.why_no_triton(torch.device(device)) is None:
        with pytest.raises(ValueError, match=r"cannot run: fp8_128x128 · fp8_1x128 has no kernel; choose another"):
            multiply(a, b, backend="triton")
    assert_bitwise_equal(multiply(a, b), multiply(a, b, backend="reference"))


# --- adding to a gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("reference", "triton", None), ids=str)
@pytest.mark.parametrize("product", ((1, 1, 1), (65, 33, 130), (16, 16, 0), (0, 4, 16)), ids=str)
@pytest.mark.parametrize("pair", (KERNEL_PAIRS[1], KERNEL_PAIRS[-1]), ids=pair_id)
def test_add_matmul(pair, product, backend, device):
    m, n, k = product
    a = ops.quantize(torch.randn(m, k, device=device), pair[0], backend="reference").rowwise
    b = ops.quantize(torch.randn(n, k, device=device), pair[1], backend="reference").rowwise
    start = torch.randn(m, n, device=device)
    out = start.clone()
    assert ops.add_matmul_(out, a, b, backend=backend) is out
    expected = start + ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5 if device == "cpu" else 4 * 2.0**-13 * k)
    before = out._version
    ops.add_matmul_(out, a, b, backend=backend)
    assert out._version > before


@pytest.mark.parametrize(
    "out",
    (torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(6, 4), torch.zeros(6, 4).t()),
    ids=("dtype", "shape", "strides"),
)
def test_add_matmul_refuses(out):
    a = ops.quantize(torch.randn(4, 32), FP8_1X128, backend="reference").rowwise
    b = ops.quantize(torch.randn(6, 32), FP8_1X128, backend="reference").rowwise
    with pytest.raises(
        ValueError, match=r"add_matmul_: out must be a contiguous float32 tensor of shape \[4, 6\] on cpu"
    ):
        ops.add_matmul_(out, a, b)
