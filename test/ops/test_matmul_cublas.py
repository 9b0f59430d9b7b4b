"""PyTorch's GEMMs, cuBLASLt's and of groups CUTLASS's: what they are handed against index formulas, and on a GPU."""

import pytest
import scaled_products
import torch
from grouped_products import PAIRS, ROUTINGS, Case, assert_close_to_each_group
from product_budgets import assert_within_budget, pair_id

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops.gemm import cublas, cutlass
from torchao_blockwise.ops.groups.ends import as_groups
from torchao_blockwise.testing import random_tensor, relative_error, shape_id

FP8_PAIR, NVFP4_PAIR = (FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)


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
    if not bias:
        total = torch.ones(m, n)
        cublas.add_matmul(total, a, b)
        assert torch.equal(total, 1 + got)


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


def test_nvfp4_payload_and_scales_that_lie_anywhere_are_copied(machine):
    """Rows of a wider tensor, and off 16 bytes."""
    a, b = (ops.quantize(random_tensor(r, 64, seed=r), NVFP4_1X16, backend="reference").rowwise for r in (20, 32))
    wide, scales = torch.zeros(20, 48, dtype=torch.uint8), torch.zeros(20, 9, dtype=torch.uint8)
    wide[:, 1:33], scales[:, 2:6] = a.qdata, a.scale.view(torch.uint8)
    machine.multiplies_by(scaled_products.scaled_mm)
    apart = a._replace(qdata=wide[:, 1:33], scale=scales[:, 2:6].view(a.scale.dtype))
    out = cublas.matmul(apart, b, torch.float32, None)
    assert_within_budget(out, a, b, 64, 2.0**-24)


# --- groups, by CUTLASS -----------------------------------------------------------------------------------------------

NVFP4_PAIRS = [pair for pair in PAIRS["m"] if pair[0] is NVFP4_1X16]


@pytest.fixture
def grouped_kernels(monkeypatch):
    """PyTorch's are those of the stand-in; Triton's make what they are handed."""
    pytest.importorskip("torchao_blockwise.ops.gemm.kernels_blackwell")

    def product(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, offs, output_dtype):
        assert (recipe_a, swizzle_a) == (recipe_b, swizzle_b)
        how = [[kind.value for kind in kinds] for kinds in (recipe_a, swizzle_a)]
        return scaled_products.scaled_grouped_mm(a, b, scale_a, scale_b, *how, offs, output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", product)


def by_experts(case: Case, ends=None, **changes) -> torch.Tensor:
    ends = case.ends if ends is None else ends
    return cutlass.grouped_matmul(case.a._replace(**changes), case.b, as_groups(ends), "m", torch.bfloat16)


@pytest.mark.parametrize("routing", [routing for routing in ROUTINGS if routing != "no_tokens"])
@pytest.mark.parametrize("pair", NVFP4_PAIRS, ids=pair_id)
def test_operands_are_handed_over_as_documented(grouped_kernels, pair, routing):
    """With one tensor scale, and with one for each expert."""
    for own_scales in ((), ((True, True),)):
        case = Case("m", pair, (*ROUTINGS[routing], *own_scales), "cpu", 528, 224)
        # Scales that differ from row to row, a number from 2 on: another row's would show.
        rows = torch.arange(case.tokens, dtype=torch.uint8) % 7
        case.a.scale.view(torch.uint8).clamp_(min=0x46).sub_(rows[:, None])
        assert_close_to_each_group(case, by_experts(case), "reference")


def test_wild_ends_and_payload_that_lies_anywhere(grouped_kernels, machine):
    machine.reads_no_group_ends()
    case = Case("m", NVFP4_PAIRS[0], ([0, 40, 0, 60], 20), "cpu", 144, 224)
    wide = torch.zeros(120, 224 // 2 + 5, dtype=torch.uint8)
    wide[:, 3:115] = case.a.qdata
    ends = torch.tensor([-5, 40, 30, 100], dtype=torch.int32)
    assert torch.equal(by_experts(case, ends, qdata=wide[:, 3:115]), by_experts(case))


def test_a_build_is_asked_for_no_rows(monkeypatch, request):
    """This build's CPU has no such kernels: it says so itself."""
    cutlass._why_not_built.cache_clear()
    request.addfinalizer(cutlass._why_not_built.cache_clear)
    reason = cutlass._why_not_built(torch.device("cpu"))
    assert reason is not None and reason.startswith(f"PyTorch {torch.__version__} has none: ")
    cutlass._why_not_built.cache_clear()
    request.getfixturevalue("grouped_kernels")
    assert cutlass._why_not_built(torch.device("cpu")) is None


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
