"""Tallies against the same figures computed in float64 from the values that `ops.dequantize` gives."""

import math

import pytest
import torch
from helpers import NoHostReads, weight

from torchao_blockwise import formats, ops
from torchao_blockwise.diagnostics import statistics
from torchao_blockwise.diagnostics.statistics import (
    AMAX,
    ERROR,
    FIRST_NONFINITE,
    NONFINITE,
    SATURATED,
    UNDERFLOWS,
    VALUES,
    Tally,
    tally,
    tensor_report,
)
from torchao_blockwise.ops.groups.ends import padded_rows
from torchao_blockwise.testing import SHAPES, relative_error, shape_id

ROW_FORMATS = ("fp8_1x128", "nvfp4_1x16")
every_format = pytest.mark.parametrize("fmt", (*ROW_FORMATS, "fp8_128x128", "nvfp4_16x16"))
row_formats = pytest.mark.parametrize("fmt", ROW_FORMATS)
directions = pytest.mark.parametrize("columnwise", (False, True), ids=("rowwise", "columnwise"))


def copy_of(x, fmt, columnwise=False):
    return ops.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise, padded=True)[columnwise]


def decoded_of(copy, x, columnwise=False):
    """As `x`, in float64."""
    decoded = ops.dequantize(copy, dtype=torch.float64)
    return decoded[:, : x.shape[0]].mT if columnwise else decoded[..., : x.shape[-1]]


def report_of(found: Tally):
    return tensor_report("layer", "x rowwise", "fp8", True, found)


def close(got, expected, rel=1e-6):
    assert got == pytest.approx(expected, rel=rel)


def check(found: Tally, x, decoded):
    """Elements, zeros and underflow; Σ x², Σ decoded² and Σ error² in float64."""
    x, decoded = x.double(), decoded.double()
    counts = [x.numel(), (x == 0).sum().item(), ((decoded == 0) & (x != 0)).sum().item()]
    assert found.sums[: UNDERFLOWS + 1].tolist() == counts
    close(found.sums[VALUES : ERROR + 1].tolist(), [t.square().sum().item() for t in (x, decoded, x - decoded)])


@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@directions
def test_sums_counts_and_squares_of_tokens(fmt, shape, columnwise, monkeypatch):
    """And the same where rows are taken some at a time."""
    x = weight(*shape, dtype=torch.bfloat16)
    x[::3, ::5] = 0
    copy = copy_of(x, fmt, columnwise)
    decoded = decoded_of(copy, x, columnwise)
    for chunk in (statistics._CHUNK, 1000):
        monkeypatch.setattr(statistics, "_CHUNK", chunk)
        found, tokens = tally(x, copy, 1, columnwise=columnwise)
        check(found, x, decoded)
        close(tokens[0].tolist(), x.double().square().sum(1).tolist())
        # Decoding in fp32 rounds twice, and the error is a small difference.
        error = (x.double() - decoded).abs()
        bound = 1e-6 * error.square().sum(1) + 2 * (error * 2.0**-23 * decoded.abs()).sum(1)
        assert ((tokens[1].double() - error.square().sum(1)).abs() <= bound).all()
        assert found.maxima[FIRST_NONFINITE] == -math.inf and found.sums[NONFINITE] == 0
        if x.numel():
            assert found.maxima[AMAX].int().view(torch.float32) == x.abs().max()


@every_format
def test_experts_are_tallied_one_by_one(fmt):
    x = weight(3, 40, 200)
    copy = ops.quantize(x, fmt).rowwise
    check(tally(x, copy, 1)[0], x, ops.dequantize(copy))


ENDS = {"ragged": (5, 140, 140, 150), "tail": (4, 9, 12, 12), "nobody": (0, 0, 0, 0)}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@directions
@row_formats
def test_tokens_in_groups(fmt, columnwise, ends):
    """Rows after the last group count for nothing, NaN or not, and padding for nothing too."""
    x = weight(150, 96)
    x[ends[-1] :] = math.nan
    group_ends = torch.tensor(ends, dtype=torch.int32)
    copy = ops.quantize(x, fmt, groups=group_ends, rowwise=not columnwise, columnwise=columnwise)[columnwise]
    found, tokens = tally(x, copy, 1, columnwise=columnwise, groups=formats.Groups(group_ends))
    decoded = ops.dequantize(copy, dtype=torch.float64)
    if columnwise:
        source = padded_rows(group_ends, 150, formats.get_format(fmt).block[1])
        decoded = torch.zeros(151, 96, dtype=torch.float64).index_copy(0, source, decoded.mT)
    check(found, x[: ends[-1]], decoded[: ends[-1]])
    assert found.sums[NONFINITE] == 0 and tokens[:, ends[-1] :].eq(0).all()
    close(tokens[1].sum().item(), found.sums[ERROR].item())


@every_format
def test_scales_saturation_sqnr_and_cosine(fmt):
    """NVFP4 rounds block scales, so that the largest of a block may lie above 6 · scale; FP8 does not."""
    x = weight(256, 256)
    x[:128, :128] = 0
    copy = ops.quantize(x, fmt).rowwise
    found, _ = tally(x, copy, 1)
    report = report_of(found)
    # The largest element in each place.
    limit = ops.dequantize(copy._replace(qdata=copy_of(torch.ones_like(x), fmt).qdata), dtype=torch.float64)
    assert found.sums[SATURATED] == (x.double().abs() > limit * (1 + 2**-12)).sum()
    assert (found.sums[SATURATED] > 0) == fmt.startswith("nvfp4")
    scales = copy.scale.double().flatten() * (1 if copy.global_scale is None else copy.global_scale.double())
    # Of blocks of zeros FP8 stores the scale of the smallest amax that it knows, NVFP4 zero.
    scales = scales[scales > (2.0**-45 if copy.global_scale is None else 0)]
    close(list(report.scale_log2), [scales.min().log2().item(), scales.max().log2().item()])
    exponents, blocks = scales.log2().floor().int().unique(return_counts=True)
    assert report.histogram == dict(zip(exponents.tolist(), blocks.tolist()))
    a, b = x.double().flatten(), decoded_of(copy, x).double().flatten()
    close(report.sqnr_db, 10 * math.log10((a @ a).item() / (a - b).square().sum().item()))
    close(report.cosine, (a @ b / (a.norm() * b.norm())).item())


def test_zeros_are_exact_and_tiny_gradients_do_not_vanish_from_the_sums():
    """Squares of fp32 values below 1e-19 are subnormal or zero."""
    report = report_of(tally(torch.zeros(16, 128), copy_of(torch.zeros(16, 128), "fp8_1x128"), 1)[0])
    assert (report.zeros, report.underflow, report.sqnr_db, report.cosine) == (100, 0, math.inf, 1)
    assert report.scale_log2 is None and report.histogram == {} and report.amax == 0
    x = weight(64, 256) * 1e-27
    tiny, usual = (report_of(tally(t, copy_of(t, "nvfp4_1x16"), 1)[0]) for t in (x, x * 2.0**80))
    assert math.isfinite(usual.sqnr_db) and tiny.sqnr_db == pytest.approx(usual.sqnr_db, abs=0.1)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@directions
@row_formats
def test_values_that_are_not_finite(fmt, columnwise, value):
    x = weight(40, 200)
    x[7, 11] = value
    found, _ = tally(x, copy_of(x, fmt, columnwise), 5, columnwise=columnwise)
    report = report_of(found)
    assert report.nonfinite == 1 and found.maxima[FIRST_NONFINITE] == -5 and math.isnan(report.sqnr_db)
    assert str(report.amax) == str(abs(value))


def probes_of(x, dy, seed=0, ends=None, first_x=0, first_dy=0, first_group=0):
    groups = None if ends is None else formats.Groups(torch.tensor(ends, dtype=torch.int32))
    projected = statistics.project(x, seed, first_x), statistics.project(dy, seed + 1, first_dy)
    return statistics.gradient_probes(*projected, groups, seed + 2, first_group)


@pytest.mark.parametrize("ends", (None, (100, 220, 280)), ids=("plain", "experts"))
def test_the_norm_of_a_gradient_is_estimated(ends):
    """Over seeds the mean square is the norm's, over all experts, and one estimate is not far from it."""
    x, dy = weight(300, 60), weight(300, 80, seed=1)
    parts = [(0, 300)] if ends is None else zip((0, *ends), ends)
    expected = math.sqrt(sum((dy[a:b].T @ x[a:b]).double().square().sum().item() for a, b in parts))
    estimates = [probes_of(x, dy, seed, ends).square().mean().item() for seed in range(0, 90, 3)]
    close(math.sqrt(sum(estimates) / len(estimates)), expected, rel=0.15)
    assert max(abs(math.sqrt(e) / expected - 1) for e in estimates) < 0.7


def test_signs_are_fair_and_independent():
    signs = statistics._signs(torch.arange(20_000), 3)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert signs.mean(0).abs().max() < 0.05
    products = signs.T @ signs / len(signs) - torch.eye(statistics.PROBES)
    assert products.abs().max() < 0.05
    assert (signs * statistics._signs(torch.arange(20_000), 4)).mean().abs() < 0.01
    assert (signs[1:] * signs[:-1]).mean().abs() < 0.01


def test_parts_of_a_gradient_add_up():
    """Microbatches, rows and columns of a weight, and groups of experts on several ranks."""
    x, dy = weight(40, 60), weight(40, 80, seed=1)
    whole = probes_of(x, dy)
    grouped = probes_of(x, dy, ends=(10, 10, 25))
    for parts, expected in (
        ((probes_of(x[:15], dy[:15]), probes_of(x[15:], dy[15:])), whole),
        ((probes_of(x[:, :32], dy), probes_of(x[:, 32:], dy, first_x=32)), whole),
        ((probes_of(x, dy[:, :32]), probes_of(x, dy[:, 32:], first_dy=32)), whole),
        (
            (probes_of(x[:10], dy[:10], ends=(10, 10)), probes_of(x[10:], dy[10:], ends=(15,), first_group=2)),
            grouped,
        ),
    ):
        # Projections are sums in fp32.
        assert relative_error(sum(parts), expected) < 1e-6


@row_formats
def test_noise_of_a_gradient(fmt):
    """Next to the noise that is really there: errors of tokens are nearly independent."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, n, generator=generator) for n in (96, 160))
    copies = [copy_of(t, fmt, True) for t in (x, dy)]
    tokens = [tally(t, copy, 0, columnwise=True)[1] for t, copy in zip((x, dy), copies)]
    decoded = [decoded_of(copy, t, True) for t, copy in zip((x, dy), copies)]
    true = (decoded[1].mT @ decoded[0] - dy.double().mT @ x.double()).square().sum()
    close(statistics.gradient_noise(*tokens).item(), true.item(), rel=0.1)


@row_formats
@pytest.mark.parametrize("grouped", (False, True), ids=("plain", "grouped"))
def test_the_host_reads_nothing(fmt, grouped):
    x, ends = weight(60, 96), torch.tensor((10, 10, 25), dtype=torch.int32)
    groups = formats.Groups(ends) if grouped else None
    copies = ops.quantize_by(x, formats.CastOptions(formats.get_format(fmt), True, True), groups)
    with NoHostReads():
        tally(x, copies.rowwise, 1, groups=groups)[0].merge(Tally.empty(x.device))
        _, tokens = tally(x, copies.columnwise, 1, columnwise=True, groups=groups)
        projected = statistics.project(x, 3)
        statistics.gradient_probes(projected, projected, groups, 5, 0)
        statistics.gradient_noise(tokens, tokens)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostReads():
        x.sum().item()
