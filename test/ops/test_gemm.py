"""ops.matmul and ops.grouped_matmul against the fp64 product of the decoded operands, within an error budget; noise."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from grouped_products import (
    PAIRS,
    ROUTINGS,
    Case,
    K,
    N,
    assert_adds,
    assert_close_to_each_group,
    backends,
    case_id,
    pair_id,
    routings,
    with_nan,
)
from product_budgets import OUT_DTYPES, accumulation_unit, assert_within_budget
from rounding_noise import accumulation, assert_noise_is_expected, rounded

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# An operand with square blocks comes second: nothing in training has it first, and only the reference computes that.
SQUARE_FIRST = [
    (a, b) for fmts in ((FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)) for a in fmts[1:] for b in fmts
]
# (M, N, K): empty in each dim, one element, one block, ragged in each dim, odd K, several blocks.
PRODUCTS = (
    (0, 16, 128), (16, 0, 128), (16, 16, 0), (0, 0, 0), (1, 1, 1), (1, 16, 128), (16, 1, 16), (128, 128, 128),
    (33, 47, 65), (63, 100, 500), (130, 129, 257), (64, 32, 592),
)  # fmt: skip
pairs = pytest.mark.parametrize("pair", PAIRS[""], ids=pair_id)


def of_kinds(*alongs: str):
    kinds = [(along, pair) for along in alongs for pair in PAIRS[along]]
    return pytest.mark.parametrize(("along", "pair"), kinds, ids=[f"{a or 'plain'}-{pair_id(p)}" for a, p in kinds])


every_kind, grouped_kinds = of_kinds("", "m", "k"), of_kinds("m", "k")


def plain(product, pair, device="cpu") -> Case:
    m, n, k = product
    return Case("", pair, ([m], 0), device, n, k)


# --- error budgets ----------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: "M{}N{}K{}".format(*p))
@pairs
def test_plain_shapes(pair, product, backend, device):
    case = plain(product, pair, device)
    out = case.run(backend=backend)
    assert out.is_contiguous() and out.dtype is torch.float32
    assert_within_budget(out, case.a, case.b, case.k, accumulation_unit(backend, pair[0], device))
    if case.k == 0:
        bias = torch.arange(float(case.n), device=device)
        assert torch.equal(case.run(backend=backend, bias=bias), bias.expand(case.tokens, -1))


@pytest.mark.parametrize("pair", SQUARE_FIRST, ids=pair_id)
def test_reference_multiplies_square_blocks_first_too(pair):
    for product in PRODUCTS:
        case = plain(product, pair)
        assert_within_budget(case.run(backend="reference"), case.a, case.b, case.k, 2.0**-24)


@routings
@grouped_kinds
def test_reference_is_the_plain_product_of_each_group(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = case.run(out_dtype, backend="reference")
        expected = torch.zeros_like(out)
        for index, a, b in case.groups():
            expected[index] = ops.matmul(a, b, out_dtype=out_dtype, backend="reference")
        assert_bitwise_equal(out, expected)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs are made of NaN: what is not written shows."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@routings
@grouped_kinds
@pytest.mark.usefixtures("poisoned_memory")
def test_triton_is_within_the_error_budget(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    out = case.run(backend="triton")
    shape = (case.tokens, N) if along == "m" else (len(case.sizes), N, K)
    assert out.shape == shape and out.is_contiguous() and out.dtype is torch.float32
    assert_close_to_each_group(case, out, "triton")


@backends
@pytest.mark.parametrize(("n", "k"), ((0, 32), (32, 0), (1, 1), (129, 65), (130, 272)), ids=str)
@grouped_kinds
def test_features(along, pair, n, k, backend, device):
    case = Case(along, pair, ([3, 0, 140], 5), device, n, k)
    out = case.run(backend=backend)
    assert out.shape == ((148, n) if along == "m" else (3, n, k))
    assert_close_to_each_group(case, out, backend)


@backends
@every_kind
def test_rounds_to_out_dtype(along, pair, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    for out_dtype in OUT_DTYPES:
        out = case.run(out_dtype, backend=backend)
        assert out.dtype is out_dtype
        assert_close_to_each_group(case, out, backend)


@backends
@pytest.mark.parametrize(
    ("out_dtype", "bias_dtype"),
    ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)),
    ids=("bfloat16_of_float32", "float16_of_bfloat16", "float32_of_float16"),
)
@pairs
def test_bias_is_added_before_the_only_rounding(pair, bias_dtype, out_dtype, backend, device):
    case = plain((37, 40, 200), pair, device)
    bias = torch.linspace(-9, 9, 40, device=device).to(bias_dtype)
    out = case.run(out_dtype, bias=bias, backend=backend)
    assert out.dtype is out_dtype
    assert_within_budget(out, case.a, case.b, 200, accumulation_unit(backend, pair[0], device), bias)


@backends
@pairs
def test_small_integers_and_zeros_multiply_exactly(pair, backend, device):
    values = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, -4.0], device=device)
    generator = torch.Generator().manual_seed(0)
    a, b = (values[torch.randint(0, 6, (n, 256), generator=generator).to(device)] for n in (48, 32))
    # An amax of 448 = 7 · 64 or 2688 makes all scales powers of two; it meets zeros in the other operand.
    top = 448.0 if pair[0].element is E4M3 else 6.0
    for x, other, column in ((a, b, 0), (b, a, 1)):
        block = pair[0].block[1]
        x[:, column::block], other[:, column::block] = top, 0.0
    a[5] = 0.0
    case = plain((48, 32, 256), pair, device)
    case.a, case.b = (ops.quantize(x, fmt, backend="reference").rowwise for x, fmt in zip((a, b), pair))
    out = case.run(backend=backend)
    # In NVFP4 global_scale = 6 / 2688 rounds.
    rtol = 0 if pair[0].element is E4M3 else 2.0**-21
    torch.testing.assert_close(out, (a.double() @ b.double().mT).float(), rtol=rtol, atol=0)


@grouped_kinds
def test_many_groups(along, pair, device):
    """More than a warp has lanes, not a power of two, most of them empty."""
    # Along "k" each group is a program, which take long in the interpreter.
    groups = 300 if along == "m" or device == "cuda" else 70
    sizes = [0] * groups
    for g, size in ((3, 2), (31, 1), (32, 1), (40, 3), (groups - 2, 2)):
        sizes[g] = size
    case = Case(along, pair, (sizes, 2), device, 16, 32)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@pytest.mark.parametrize("tokens_a_group", (16, 64, 200), ids="tokens{}".format)
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tiles_of_all_heights(pair, tokens_a_group, device):
    case = Case("m", pair, ([tokens_a_group + 3, 0, tokens_a_group - 3], 0), device)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@grouped_kinds
def test_programs_write_nothing_of_each_other(along, pair, device, monkeypatch):
    """Bits do not depend on the order of programs: here the last one comes first."""
    if device == "cuda":
        pytest.skip("a GPU takes another order")
    case = Case(along, pair, ROUTINGS["ragged_and_a_tail"], device)
    expected = case.run(backend="triton")
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    in_order = interpreter.set_grid_idx
    monkeypatch.setattr(interpreter, "set_grid_idx", lambda x, y, z: in_order(interpreter.grid_dim[0] - 1 - x, y, z))
    assert_bitwise_equal(case.run(backend="triton"), expected)


@backends
@every_kind
def test_autocast_changes_nothing(along, pair, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    outside = case.run(backend=backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_bitwise_equal(case.run(backend=backend), outside)


# --- NaN and Inf ------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
@pairs
def test_what_is_not_finite_reaches_its_row_in_fp8_and_all_in_nvfp4(pair, value, backend, device):
    x, case = [random_tensor(*shape, device=device) * 2.0**-6 for shape in ((40, 300), (300, 300))], None
    rows = slice(290 // pair[1].block[0] * pair[1].block[0], None if pair[1].block[0] > 1 else 291)
    for hurt, at, hit in ((0, (7, 200), (7, slice(None))), (1, (290, 299), (slice(None), rows))):
        case = plain((40, 300, 300), pair, device)
        poisoned = [t.clone() for t in x]
        poisoned[hurt][at] = value
        case.a, case.b = (ops.quantize(t, fmt, backend="reference").rowwise for t, fmt in zip(poisoned, pair))
        expected = torch.ones(40, 300, dtype=torch.bool, device=device)
        expected[hit if pair[0].element is E4M3 else ...] = False
        assert torch.equal(case.run(torch.bfloat16, backend=backend).isfinite(), expected)


@backends
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tokens_of_no_group_are_zeros_whatever_they_hold(pair, backend, device):
    case = Case("m", pair, ([130, 1, 0], 150), device)
    expected = case.run(backend=backend)
    case.a = with_nan(case.a, slice(131, None))
    assert_bitwise_equal(case.run(backend=backend), expected)
    assert (expected[131:] == 0).all() and expected[:131].isfinite().all()


@backends
@grouped_kinds
def test_nan_stays_in_its_group(along, pair, backend, device):
    """Of FP8 in the payload; a tensor scale is that of all groups, and leaves what is of no group zero."""
    if pair[0].has_global_scale:
        case = Case(along, pair, ([0, 17, 0], 4), device)
        case.a = case.a._replace(global_scale=torch.full_like(case.a.global_scale, float("nan")))
        out = case.run(backend=backend)
        hit, rest = (out[:17], out[17:]) if along == "m" else (out[1], out[::2])
        assert hit.isnan().all() and (rest == 0).all()
        return
    case = Case(along, pair, ([20, 150, 30], 0), device)
    expected = case.run(backend=backend)
    if along == "m":
        case.b.qdata[1].view(torch.uint8).fill_(0x7F)
    else:
        # The second group's 256 padded columns.
        case.a.qdata.view(torch.uint8)[:, 128:384] = 0x7F
    out, hit = case.run(backend=backend), slice(20, 170) if along == "m" else slice(1, 2)
    assert out[hit].isnan().all()
    for part in (slice(0, hit.start), slice(hit.stop, None)):
        assert_bitwise_equal(out[part], expected[part])


# --- noise ------------------------------------------------------------------------------------------------------------


@pairs
def test_noise_is_that_of_the_formats(pair):
    """Against the product of the operands before they were quantized."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(256, 1024, generator=generator) for _ in range(2))
    out = ops.matmul(
        *(ops.quantize(x, fmt, backend="reference").rowwise for x, fmt in zip((a, b), pair)),
        out_dtype=torch.float32,
        backend="reference",
    )
    assert_noise_is_expected("product", [(out, rounded(a, pair[0]), rounded(b, pair[1]))], accumulation("cpu", 1024))


# --- adding to a gradient ---------------------------------------------------------------------------------------------

SUMS = [
    ("", pair, ([m], 0), n, k) for pair in PAIRS[""] for m, n, k in ((1, 1, 1), (65, 33, 130), (16, 16, 0), (0, 4, 16))
]
SUMS += [("k", pair, routing, N, K) for pair, routing in itertools.product(PAIRS["k"], ROUTINGS.values())]


@pytest.mark.parametrize("backend", ("reference", "triton", None), ids=str)
@pytest.mark.parametrize(("along", "pair", "routing", "n", "k"), SUMS, ids=[case_id(*row) for row in SUMS])
def test_adds_to_a_gradient(along, pair, routing, n, k, backend, device):
    case = Case(along, pair, routing, device, n, k)
    right = case.run(backend=backend)

    def add(out):
        before = out._version
        assert case.add(out, backend=backend) is out
        assert out._version > before

    assert_adds(case, add, right)
