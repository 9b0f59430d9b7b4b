"""ops.norm_quantize: statistics, and the bits of the norm and of quantize one after the other, given them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, NVFP4_1X16, CastOptions
from torchao_blockwise.testing import (
    SHAPES,
    assert_bitwise_equal,
    assert_operands_equal,
    random_tensor,
    shape_id,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
kinds = pytest.mark.parametrize("kind", ("rms", "layer"))
shapes = pytest.mark.parametrize("shape", (*SHAPES, (130, 48), (16, 1000), (272, 128)), ids=shape_id)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
copies = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
ROWWISE, BOTH = CastOptions(FP8_1X128), CastOptions(FP8_1X128, columnwise=True)
EPS = 1e-5


def norm_input(*shape, kind="rms", dtype=torch.bfloat16, weights=torch.float32, device="cpu"):
    """(x, statistics of the reference, weight, bias), scaled so that no value is lost in 16 bits."""
    x = random_tensor(*shape, dtype=dtype, device=device)
    weight, bias = (random_tensor(1, shape[1], dtype=weights, seed=s, device=device)[0] / 16 for s in (1, 2))
    return x, ops.norm_statistics(x, kind, EPS, backend="reference"), weight, bias


def by_hand(x, statistics, weight, bias, dtype=None):
    """y as its definition says, an operation a line."""
    mean, rstd = statistics
    y = x.float()
    if mean is not None:
        y = y - mean[:, None]
    y = y * rstd[:, None]
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype or x.dtype)


def quantized(y, options):
    """By the reference, as an operation of its own."""
    return ops.quantize_by(y, options, backend="reference")


def assert_copies_equal(got, expected) -> None:
    def without_nan(t):
        # An fp32 NaN's payload is the hardware's choice.
        return t.nan_to_num(7.0) if t is not None and t.dtype == torch.float32 else t

    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_operands_equal(
                *(x._replace(scale=without_nan(x.scale), global_scale=without_nan(x.global_scale)) for x in (a, b))
            )


# --- statistics -------------------------------------------------------------------------------------------------------


def assert_statistics(got, x, kind) -> None:
    """Those of the rows in fp64, but for some ulps."""
    mean, rstd = got
    exact = x.double()
    if kind == "layer":
        assert ((mean - exact.mean(-1)).abs() <= 1e-6 * exact.abs().mean(-1)).all()
        # In a row of one element x - mean is exactly 0.
        exact = exact - (exact if x.shape[1] == 1 else exact.mean(-1, keepdim=True))
    expected = (exact.square().mean(-1) + EPS).rsqrt()
    assert ((rstd - expected).abs() <= 5e-7 * expected).all()
    assert (mean is None) == (kind == "rms") and rstd.dtype == torch.float32


# Programs of eight rows that are read once, of four, two and one, and of rows in a loop; few have all of their rows.
STATISTICS_SHAPES = ((9, 1), (9, 127), (9, 511), (17, 512), (7, 513), (5, 1500), (3, 4096), (2, 8192), (5, 8193))


@backends
@dtypes
@kinds
@pytest.mark.parametrize("shape", STATISTICS_SHAPES, ids=shape_id)
def test_statistics_are_those_of_the_fp64_rows(kind, dtype, shape, backend, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    assert_statistics(ops.norm_statistics(x, kind, EPS, backend=backend), x, kind)


@backends
@kinds
@pytest.mark.parametrize("columns", (511, 8193))
def test_statistics_of_rows_far_from_zero(columns, kind, backend, device):
    """Squares are of differences from the mean: E[x²] - E[x]² would leave an ulp of 1000² of them."""
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)).to(device) + 1000
    assert_statistics(ops.norm_statistics(x, kind, EPS, backend=backend), x, kind)


@backends
@kinds
@pytest.mark.parametrize("columns", (500, 8193))
def test_statistics_of_any_strides(columns, kind, backend, device):
    x = random_tensor(10, 2 * columns, dtype=torch.bfloat16, device=device)
    for layout in (x[:, columns:], x[::2, ::2], x[:, 1 : columns + 1].mT.contiguous().mT):
        assert_statistics(ops.norm_statistics(layout, kind, EPS, backend=backend), layout, kind)


def test_statistics_agree_with_pytorchs():
    x, weight = random_tensor(9, 512), torch.ones(512)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [512], weight, weight, EPS)
    got = ops.norm_statistics(x, "layer", EPS, backend="reference")
    ulp = torch.finfo(torch.float32).eps
    assert ((got.rstd - rstd[:, 0]).abs() <= 4 * ulp * rstd[:, 0]).all()
    assert ((got.mean - mean[:, 0]).abs() <= 4 * ulp * x.abs().mean(-1)).all()


@backends
@kinds
def test_statistics_of_bad_rows(kind, backend, device):
    x = torch.ones(4, 40, device=device)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    rstd = ops.norm_statistics(x, kind, EPS, backend=backend).rstd
    assert rstd[1].isnan() and not (rstd[2] > 0) and rstd[[0, 3]].isfinite().all()


# --- normalize --------------------------------------------------------------------------------------------------------


@backends
@kinds
@shapes
def test_normalize_is_its_definition(shape, kind, backend, device):
    x, statistics, weight, bias = norm_input(*shape, kind=kind, device=device)
    assert_bitwise_equal(
        ops.normalize(x, statistics, weight, bias, backend=backend), by_hand(x, statistics, weight, bias)
    )


def test_rms_norm_in_fp32_has_pytorchs_bits_given_equal_statistics():
    """The order of the products is PyTorch's: x · rstd, then · weight."""
    x, statistics, weight, _ = norm_input(64, 256, dtype=torch.float32)
    expected = F.rms_norm(x, (256,), weight, EPS)
    # Its rstd comes of a reciprocal square root that rounds some rows otherwise.
    same = statistics.rstd == (x.square().mean(-1) + EPS).rsqrt()
    assert same.sum() > 32
    assert_bitwise_equal(ops.normalize(x, statistics, weight)[same], expected[same])


@kinds
@dtypes
def test_normalize_agrees_with_pytorch(dtype, kind):
    x, statistics, weight, bias = norm_input(64, 300, kind=kind, dtype=dtype, weights=dtype)
    got = ops.normalize(x, statistics, weight, bias if kind == "layer" else None)
    if kind == "rms":
        expected = F.rms_norm(x, (300,), weight, EPS)
    else:
        expected = F.layer_norm(x, (300,), weight, bias, EPS)
    # Two roundings to the dtype differ by an ulp at most. Before them come the mean, a sum of terms of this size, rstd
    # and the products: some ulps of fp32.
    size = x.float().abs() + (x.float().abs().mean(-1, keepdim=True) if kind == "layer" else 0)
    scale = size * statistics.rstd[:, None] * weight.float().abs()
    error = (got.double() - expected.double()).abs()
    fp32 = 6 * torch.finfo(torch.float32).eps * (scale + (bias.float().abs() if kind == "layer" else 0))
    assert (error <= fp32 + (0 if dtype == torch.float32 else torch.finfo(dtype).eps * got.double().abs())).all()


# --- quantized in the same pass ---------------------------------------------------------------------------------------


@backends
@copies
@kinds
@shapes
def test_shapes(shape, kind, copies, backend, device):
    x, statistics, weight, bias = norm_input(*shape, kind=kind, device=device)
    for padded in (False, True):
        options = CastOptions(FP8_1X128, *copies, padded=padded)
        got = ops.norm_quantize(x, options, statistics, weight, bias, backend=backend)
        assert_copies_equal(got, quantized(by_hand(x, statistics, weight, bias), options))


@backends
@pytest.mark.parametrize("weights", DTYPES, ids=lambda d: f"weights_{str(d)[6:]}")
@pytest.mark.parametrize("out", (None, torch.bfloat16), ids=("same", "to_bf16"))
@dtypes
def test_dtypes(dtype, out, weights, backend, device):
    x, statistics, weight, bias = norm_input(65, 200, kind="layer", dtype=dtype, weights=weights, device=device)
    got = ops.norm_quantize(x, BOTH, statistics, weight, bias, dtype=out, backend=backend)
    assert_copies_equal(got, quantized(by_hand(x, statistics, weight, bias, out), BOTH))


@backends
@pytest.mark.parametrize("parts", ((False, False), (True, False), (False, True)), ids=("bare", "weight", "bias"))
@kinds
def test_parts_may_be_missing(kind, parts, backend, device):
    x, statistics, weight, bias = norm_input(33, 150, kind=kind, device=device)
    weight, bias = weight if parts[0] else None, bias if parts[1] else None
    got = ops.norm_quantize(x, BOTH, statistics, weight, bias, backend=backend)
    assert_copies_equal(got, quantized(by_hand(x, statistics, weight, bias), BOTH))


@backends
def test_power_of_2_scales(backend, device):
    x, statistics, weight, _ = norm_input(130, 150, device=device)
    for options in (ROWWISE, BOTH):
        options = options._replace(power_of_2_scales=True)
        got = ops.norm_quantize(x, options, statistics, weight, backend=backend)
        assert_copies_equal(got, quantized(by_hand(x, statistics, weight, None), options))


@backends
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")), ids=str)
def test_special_numbers_stay_in_their_blocks(value, backend, device):
    x = random_tensor(140, 300, device=device)
    x[130, 280] = value
    statistics = ops.norm_statistics(x, "rms", EPS, backend=backend)
    weight, bias = torch.ones(300, device=device), torch.ones(300, device=device)
    rowwise, columnwise = ops.norm_quantize(x, BOTH, statistics, weight, bias, backend=backend)
    assert not ops.dequantize(rowwise)[130, 280].isfinite() and not ops.dequantize(columnwise)[280, 130].isfinite()
    assert ops.dequantize(rowwise)[:130].isfinite().all()


@backends
@pytest.mark.parametrize(
    "layout",
    (lambda x: x.mT.contiguous().mT, lambda x: torch.cat((x, x), -1)[:, : x.shape[1]], lambda x: x[::2]),
    ids=("transposed", "column_slice", "every_second_row"),
)
def test_strides_do_not_matter(layout, backend, device):
    x = layout(random_tensor(48, 144, dtype=torch.bfloat16, device=device))
    for kind in ("rms", "layer"):
        statistics = ops.norm_statistics(x, kind, EPS, backend="reference")
        weight = torch.arange(288, device=device).float()[::2]
        expected = ops.norm_quantize(x.contiguous(), ROWWISE, statistics, weight.clone(), backend="reference")
        assert_copies_equal(ops.norm_quantize(x, ROWWISE, statistics, weight, backend=backend), expected)


@backends
@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not FP8_1X128], ids=lambda f: f.name)
def test_other_formats_run_as_two_operations(fmt, backend, device):
    x, statistics, weight, _ = norm_input(33, 150, device=device)
    options = CastOptions(fmt, columnwise=True)
    got = ops.norm_quantize(x, options, statistics, weight, backend=backend)
    assert_copies_equal(got, quantized(by_hand(x, statistics, weight, None), options))


def test_inputs_that_require_grad_give_the_same_bits():
    x, statistics, weight, _ = norm_input(33, 150, dtype=torch.float32)
    expected = ops.norm_quantize(x, ROWWISE, statistics, weight)
    got = ops.norm_quantize(x.clone().requires_grad_(), ROWWISE, statistics, weight.clone().requires_grad_())
    assert_copies_equal(got, expected)
    assert not got.rowwise.qdata.requires_grad


X, S = torch.ones(4, 32), ops.NormStatistics(None, torch.ones(4))
REFUSALS = {
    "kind": (
        lambda: ops.norm_statistics(X, "batch", EPS),
        ValueError,
        "norm_statistics: kind must be one of ('rms', 'layer'), got 'batch'",
    ),
    "3-D": (
        lambda: ops.norm_statistics(X[None], "rms", EPS),
        ValueError,
        "norm_statistics: x must be [M, K], got shape [1, 4, 32]; reshape it",
    ),
    "f64": (
        lambda: ops.norm_quantize(X.double(), ROWWISE, S),
        TypeError,
        "norm_quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first",
    ),
    "weight": (
        lambda: ops.norm_quantize(X, ROWWISE, S, torch.ones(31)),
        ValueError,
        "norm_quantize: weight must be [32] for x [4, 32], got shape [31]",
    ),
    "rstd": (
        lambda: ops.normalize(X, ops.NormStatistics(None, torch.ones(4, 1))),
        ValueError,
        "normalize: rstd must be [4] for x [4, 32], got shape [4, 1]",
    ),
    "nothing": (
        lambda: ops.norm_quantize(X, CastOptions(FP8_1X128, rowwise=False), S),
        ValueError,
        "norm_quantize: nothing to compute; ask for rowwise, columnwise or both",
    ),
    "dtype": (
        lambda: ops.normalize(X, S, dtype=torch.int8),
        TypeError,
        "normalize: dtype must be bfloat16, float16 or float32, got torch.int8",
    ),
    "power_of_2": (
        lambda: ops.norm_quantize(X, CastOptions(NVFP4_1X16, power_of_2_scales=True), S),
        ValueError,
        "norm_quantize: nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_a_named_backend_that_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="norm_quantize: backend triton cannot run: Triton kernels run on CUDA"):
        ops.norm_quantize(X, ROWWISE, S, backend="triton")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("backend", ("triton", "auto"))
@pytest.mark.parametrize("shape", ((4096, 7168), (4097, 1536)), ids=shape_id)
def test_one_pass_has_the_bits_of_two_kernels_and_of_the_reference(shape, backend, kind):
    x, _, weight, bias = norm_input(*shape, kind=kind, weights=torch.bfloat16, device="cuda")
    statistics = ops.norm_statistics(x, kind, EPS, backend="triton")
    got = ops.norm_quantize(x, BOTH, statistics, weight, bias, backend=backend)
    y = ops.normalize(x, statistics, weight, bias, backend="triton")
    assert_copies_equal(got, ops.quantize(y, FP8_1X128, columnwise=True, backend="triton"))
    assert_copies_equal(got, ops.norm_quantize(x, BOTH, statistics, weight, bias, backend="reference"))
