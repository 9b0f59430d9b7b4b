"""cuBLASLt products: the re-laid scales against index formulas, what `why_not` admits, and the product on a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import scaled_products
import torch
from product_budgets import assert_within_budget

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops.gemm import cublas
from torchao_blockwise.testing import random_tensor, relative_error, shape_id

# --- what it admits ---------------------------------------------------------------------------------------------------

FP8_PAIR, NVFP4_PAIR = (FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)
# A format of e4m3 that cuBLASLt knows nothing of: the element is not what it goes by.
FP8_1X64 = dataclasses.replace(FP8_1X128, name="fp8_1x64", block=(1, 64))
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def why_not(machine, product, pair=FP8_PAIR, capability=HOPPER, cuda="12.9", out_dtype=torch.bfloat16):
    """`cublas.why_not` for payloads [M, K] and [N, K] bytes as if on such a GPU."""
    m, n, k = product
    machine.has_gpu_of(capability)
    machine.has_cuda(cuda)
    for fmt in pair:
        machine.patch.setitem(FORMATS, fmt.name, fmt)
    payloads = (SimpleNamespace(shape=shape, device=torch.device("cuda:0")) for shape in ((m, k), (n, k)))
    a, b = (Operand(qdata, None, None, fmt.name) for qdata, fmt in zip(payloads, pair))
    return cublas.why_not(a, b, out_dtype, None)


ADMITTED = {
    "one block": {},
    "fp32 out": {"product": (4, 16, 16), "out_dtype": torch.float32},
    "K of 592": {"product": (64, 128, 592)},
    "K of 592, 1x128 · 1x128": {"product": (64, 128, 592), "pair": (FP8_1X128, FP8_1X128)},
    "any M and K": {"product": (6, 16, 25)},
    "CUDA 13.0": {"product": (64, 128, 592), "cuda": "13.0"},
    "nvfp4 on Blackwell": {"product": (1, 32, 16), "pair": NVFP4_PAIR, "capability": BLACKWELL},
    "nvfp4 on sm_120": {"product": (1, 32, 16), "pair": NVFP4_PAIR, "capability": (12, 0)},
    "nvfp4 that is decoded": {"product": (16, 8, 16), "pair": NVFP4_PAIR, "cuda": "12.8"},
    "nvfp4 of any K": {"product": (7, 32, 25), "pair": NVFP4_PAIR, "capability": BLACKWELL},
}
REFUSED = {
    "e4m3 block scaling needs sm_90, got sm_80": {"capability": AMPERE},
    "e4m3 block scaling needs sm_90, got sm_100": {"capability": BLACKWELL},
    "block scaling needs CUDA 12.9 or newer, got 12.8": {"cuda": "12.8"},
    "block scaling needs CUDA 12.9 or newer, got None": {"cuda": None},
    "cuBLASLt does not support fp8_128x128 · fp8_1x128": {"pair": (FP8_128X128, FP8_1X128)},
    "cuBLASLt does not support fp8_1x64 · fp8_1x64": {"pair": (FP8_1X64, FP8_1X64)},
    "out_dtype must be bfloat16 or float32, got torch.float16": {"out_dtype": torch.float16},
    "cuBLASLt does not support empty GEMMs, got M=0, N=16, K=16": {"product": (0, 16, 16)},
    "N must be a multiple of 16, got N=8": {"product": (16, 8, 16)},
}


@pytest.mark.parametrize(
    ("reason", "case"), [*((None, case) for case in ADMITTED.values()), *REFUSED.items()], ids=[*ADMITTED, *REFUSED]
)
def test_what_it_admits_and_why_not_the_rest(reason, case, machine):
    assert why_not(machine, **{"product": (128, 128, 128), **case}) == reason


@pytest.mark.parametrize("b_fmt", (FP8_128X128, FP8_1X128), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("product", ((1, 16, 1), (4, 16, 16), (6, 32, 25), (130, 144, 400)), ids=shape_id)
def test_operands_are_padded_as_it_wants_them(machine, product, bias, b_fmt):
    """A stand-in for the library that checks what it asks for, and multiplies what it is given."""
    m, n, k = product
    a = ops.quantize(random_tensor(m, k, seed=1), FP8_1X128, backend="reference").rowwise
    b = ops.quantize(random_tensor(n, k, seed=2), b_fmt, backend="reference").rowwise

    def scaled_mm(a, b, a_scales, a_scalings, a_swizzles, b_scales, b_scalings, b_swizzles, out_dtype):
        (a_scale,), (b_scale,) = a_scales, b_scales
        (rows, columns), blocks = a.shape, -(-a.shape[1] // 128)
        assert rows % 4 == 0 and columns % 16 == 0 and b.shape[1] % 16 == 0
        assert a.is_contiguous() and b.t().is_contiguous()
        assert a_scale.shape == (rows, blocks) and a_scale.t().is_contiguous()
        b_scale = b_scale.t()
        if b_fmt is FP8_1X128:
            assert b_scale.shape == (blocks, b.shape[1]) and b_scale.is_contiguous()
        else:
            assert b_scale.shape[1] == -(-blocks // 4) * 4 and b_scale.stride(1) == 1
            assert (b_scale[:, blocks:] == 1).all()
            b_scale = b_scale[:, :blocks]
        padded = Operand(a, a_scale.t(), None, FP8_1X128.name), Operand(b.t(), b_scale, None, b_fmt.name)
        return ops.matmul(*padded, out_dtype=out_dtype, backend="reference")

    machine.multiplies_by(scaled_mm)
    options = torch.float32, torch.randn(n) if bias else None
    got = cublas.matmul(a, b, *options)
    expected = ops.matmul(a, b, out_dtype=options[0], bias=options[1], backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# (M, N, K): one row and one block, K that does not fill 16 bytes, tiles of rows and of scales that are not full.
NVFP4_PRODUCTS = ((1, 16, 1), (5, 32, 16), (33, 48, 25), (130, 144, 200), (129, 272, 592), (256, 128, 256))


@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("product", NVFP4_PRODUCTS, ids=shape_id)
@pytest.mark.parametrize("b_fmt", (NVFP4_16X16, NVFP4_1X16), ids=lambda fmt: fmt.name)
def test_nvfp4_is_handed_over_as_documented(machine, b_fmt, product, bias):
    """The product of what a reader of the manuals finds is that of the operands."""
    m, n, k = product
    # Scales that differ from row to row and from block to block, tensor scales that differ.
    a, b = (random_tensor(rows, k, seed=seed) for rows, seed in ((m, 1), (n, 2)))
    a = ops.quantize(a * torch.logspace(0, -2, m)[:, None], NVFP4_1X16, backend="reference").rowwise
    b = ops.quantize(b * torch.logspace(-3, 0, k), b_fmt, backend="reference").rowwise
    machine.multiplies_by(scaled_products.scaled_mm)
    bias = torch.linspace(-1, 1, n) if bias else None
    out = cublas.matmul(a, b, torch.float32, bias)
    assert_within_budget(out, a, b, k, 2.0**-24, bias)


def test_nvfp4_payload_that_lies_anywhere_is_copied(machine):
    """Rows of a wider tensor, and off 16 bytes."""
    a, b = (ops.quantize(random_tensor(r, 64, seed=r), NVFP4_1X16, backend="reference").rowwise for r in (20, 32))
    wide = torch.zeros(20, 48, dtype=torch.uint8)
    wide[:, 1:33] = a.qdata
    machine.multiplies_by(scaled_products.scaled_mm)
    out = cublas.matmul(a._replace(qdata=wide[:, 1:33]), b, torch.float32, None)
    assert_within_budget(out, a, b, 64, 2.0**-24)


@pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
def test_the_order_of_scales_is_torchaos(fmt):
    """Of a grid that is not contiguous, too."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    kernels = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_blackwell")
    x = ops.quantize(random_tensor(300, 272), fmt, backend="reference").rowwise
    wide = torch.zeros(len(x.scale), 24, dtype=torch.uint8)
    wide[:, 2:19] = x.scale.view(torch.uint8)
    expected = to_blocked(wide[torch.arange(300) // fmt.block[0], 2:19])
    for scale in (x.scale, wide[:, 2:19].view(x.scale.dtype)):
        assert torch.equal(kernels.swizzled_scales(x._replace(scale=scale)).view(torch.uint8), expected)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

GPU_PRODUCTS = ((4, 16, 16), (64, 128, 128), (128, 128, 592), (260, 272, 576), (1024, 512, 1168), (512, 384, 2048))
GPU_PRODUCTS += ((1, 16, 1), (261, 272, 577), (4097, 576, 1027))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("product", GPU_PRODUCTS, ids=lambda p: "M{}N{}K{}".format(*p))
@pytest.mark.parametrize(
    "pair",
    (FP8_PAIR, (FP8_1X128, FP8_1X128), NVFP4_PAIR, (NVFP4_1X16, NVFP4_1X16)),
    ids=lambda pair: "-".join(fmt.name for fmt in pair),
)
def test_gpu_product_matches_reference(pair, product, out_dtype, bias):
    m, n, k = product
    a = ops.quantize(random_tensor(m, k, seed=1, device="cuda"), pair[0], backend="reference").rowwise
    b = ops.quantize(random_tensor(n, k, seed=2, device="cuda"), pair[1], backend="reference").rowwise
    options = {"out_dtype": out_dtype, "bias": torch.randn(n, device="cuda") if bias else None}
    if reason := cublas.why_not(a, b, **options):
        pytest.skip(reason)
    got = ops.matmul(a, b, backend="cublas", **options)
    expected = ops.matmul(a, b, backend="reference", **options)
    assert got.dtype is out_dtype
    # Hopper adds 32 products and the running sum of a block in fixed point and cuts it off at 14 bits (DeepSeek-V3
    # report §3.3.2). The cuts all go one way, so four steps a block may lose 4 · 2^-13. Then one rounding of each.
    budget = 4 * 2.0**-13 + 2 * (2.0**-8 if out_dtype is torch.bfloat16 else 2.0**-24)
    assert relative_error(got, expected) <= budget
