"""Tallies against the same figures computed in float64 from the values that `ops.dequantize` gives."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import weight
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import formats, ops
from torchao_blockwise.diagnostics import statistics
from torchao_blockwise.diagnostics.records import Kind
from torchao_blockwise.diagnostics.statistics import (
    AMAX,
    DECODED,
    ELEMENTS,
    ERROR,
    FIRST_NONFINITE,
    NEVER,
    NONFINITE,
    SATURATED,
    UNDERFLOWS,
    VALUES,
    ZEROS,
    Tally,
    tally,
)
from torchao_blockwise.diagnostics.tallies import tensor_report
from torchao_blockwise.ops.groups.ends import padded_rows
from torchao_blockwise.testing import SHAPES, relative_error, shape_id

pytestmark = pytest.mark.usefixtures("no_interpreter")

aten = torch.ops.aten
ROW_FORMATS = ("fp8_1x128", "nvfp4_1x16")
FORMATS = (*ROW_FORMATS, "fp8_128x128", "nvfp4_16x16")
formats_and_shapes = [
    pytest.mark.parametrize("fmt", FORMATS),
    pytest.mark.parametrize("shape", SHAPES, ids=shape_id),
    pytest.mark.parametrize("columnwise", (False, True), ids=("rowwise", "columnwise")),
]


def every_case(test):
    for mark in formats_and_shapes:
        test = mark(test)
    return test


def copy_of(x, fmt, columnwise):
    return ops.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise, padded=True)[columnwise]


def decoded_of(copy, x, columnwise):
    """As `x`, in float64."""
    decoded = ops.dequantize(copy, dtype=torch.float64)
    return decoded[:, : x.shape[0]].mT if columnwise else decoded[:, : x.shape[1]]


def figures(x, decoded):
    """(elements, zeros, underflow; Σ x², Σ decoded², Σ error²) in float64."""
    x64, decoded64 = x.double(), decoded.double()
    sums = [t.square().sum().item() for t in (x64, decoded64, x64 - decoded64)]
    return [x.numel(), (x == 0).sum().item(), ((decoded64 == 0) & (x64 != 0)).sum().item()], sums


def close(got, expected):
    assert got == pytest.approx(expected, rel=1e-6)


@every_case
def test_sums_and_counts(fmt, shape, columnwise):
    x = weight(*shape, dtype=torch.bfloat16)
    x[::3, ::5] = 0
    copy = copy_of(x, fmt, columnwise)
    found, tokens = tally(x, copy, 1, columnwise=columnwise)
    decoded = decoded_of(copy, x, columnwise)
    counts, sums = figures(x, decoded)
    assert found.counts[[ELEMENTS, ZEROS, UNDERFLOWS]].tolist() == counts
    close(found.sums[[VALUES, DECODED, ERROR]].tolist(), sums)
    assert found.maxima[FIRST_NONFINITE] == -NEVER
    close(tokens.values.tolist(), x.double().square().sum(1).tolist())
    close(tokens.error.tolist(), (x.double() - decoded).square().sum(1).tolist())
    if x.numel():
        assert found.maxima[AMAX].int().view(torch.float32) == x.abs().max()


@pytest.mark.parametrize("columnwise", (False, True), ids=("rowwise", "columnwise"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_taken_some_at_a_time(fmt, columnwise, monkeypatch):
    x = weight(300, 576)
    copy = copy_of(x, fmt, columnwise)
    whole, tokens = tally(x, copy, 1, columnwise=columnwise)
    monkeypatch.setattr(statistics, "_CHUNK", 1000)
    parts, tokens_of_parts = tally(x, copy, 1, columnwise=columnwise)
    assert torch.equal(parts.counts, whole.counts) and torch.equal(parts.maxima, whole.maxima)
    close(parts.sums.tolist(), whole.sums.tolist())
    close(tokens_of_parts.error.tolist(), tokens.error.tolist())


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_are_tallied_one_by_one(fmt):
    x = weight(3, 40, 200)
    whole, _ = tally(x, ops.quantize(x, fmt, rowwise=True).rowwise, 1)
    counts, sums = figures(x, ops.dequantize(ops.quantize(x, fmt).rowwise, dtype=torch.float64))
    assert whole.counts[: len(counts)].tolist() == counts
    close(whole.sums.tolist(), sums)


ENDS = {"ragged": (5, 140, 140, 150), "tail": (4, 9, 12, 12), "nobody": (0, 0, 0, 0), "all_to_one": (0, 0, 150, 150)}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("columnwise", (False, True), ids=("rowwise", "columnwise"))
@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_tokens_in_groups(fmt, columnwise, ends):
    """What lies after the last group counts for nothing, NaN or not, and padding for nothing too."""
    x = weight(150, 96)
    x[ends[-1] :] = math.nan
    group_ends = torch.tensor(ends, dtype=torch.int32)
    copy = ops.quantize(x, fmt, groups=group_ends, rowwise=not columnwise, columnwise=columnwise)[columnwise]
    groups = formats.Groups(group_ends)
    found, tokens = tally(x, copy, 1, columnwise=columnwise, groups=groups)
    inside = x[: ends[-1]]
    decoded = ops.dequantize(copy, dtype=torch.float64)
    if columnwise:
        source = padded_rows(group_ends, 150, formats.get_format(fmt).block[1])
        decoded = torch.zeros(151, 96, dtype=torch.float64).index_copy(0, source, decoded.mT)
    counts, sums = figures(inside, decoded[: ends[-1]])
    assert found.counts[: len(counts)].tolist() == counts and found.counts[NONFINITE] == 0
    close(found.sums.tolist(), sums)
    assert tokens.values.numel() == (source.numel() if columnwise else 150)
    close(tokens.error.sum().item(), sums[ERROR])


def test_saturation_is_what_was_clipped():
    """NVFP4 rounds block scales, so that the largest of a block may lie above 6 · scale; FP8 does not."""
    x = weight(64, 256)
    for fmt, is_clipped in (("nvfp4_1x16", True), ("fp8_1x128", False)):
        copy = ops.quantize(x, fmt).rowwise
        found, _ = tally(x, copy, 1)
        scale = copy.scale.double() if fmt.startswith("nvfp4") else copy.scale.double().mT
        scale = scale * (1 if copy.global_scale is None else copy.global_scale.double())
        block = formats.get_format(fmt).block[1]
        limit = formats.get_format(fmt).element.max * scale.repeat_interleave(block, 1)
        assert found.counts[SATURATED] == (x.double().abs() > limit * (1 + 2**-12)).sum()
        assert (found.counts[SATURATED] > 0) == is_clipped


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales(fmt):
    x = weight(256, 256)
    x[:128, :128] = 0
    copy = ops.quantize(x, fmt).rowwise
    found, _ = tally(x, copy, 1)
    report = report_of(found)
    scales = copy.scale.double().flatten() * (1 if copy.global_scale is None else copy.global_scale.double())
    # Of blocks of zeros FP8 stores the scale of the smallest amax that it knows, NVFP4 zero.
    scales = scales[scales > (2.0**-45 if copy.global_scale is None else 0)]
    close(list(report.scale_log2), [scales.min().log2().item(), scales.max().log2().item()])
    exponents, blocks = scales.log2().floor().int().unique(return_counts=True)
    assert report.histogram == dict(zip(exponents.tolist(), blocks.tolist()))


def report_of(found: Tally):
    numbers = [t.tolist() for t in found]
    return tensor_report("layer", Kind("x", "rowwise"), "fp8", True, *numbers)


@pytest.mark.parametrize("fmt", FORMATS)
def test_sqnr_and_cosine(fmt):
    x = weight(130, 260)
    copy = ops.quantize(x, fmt).rowwise
    report = report_of(tally(x, copy, 1)[0])
    a, b = x.double().flatten(), decoded_of(copy, x, False).double().flatten()
    close(report.sqnr_db, 10 * math.log10((a @ a).item() / (a - b).square().sum().item()))
    close(report.cosine, (a @ b / (a.norm() * b.norm())).item())


def test_zeros_and_what_is_exact():
    report = report_of(tally(torch.zeros(16, 128), ops.quantize(torch.zeros(16, 128), "fp8_1x128").rowwise, 1)[0])
    assert (report.zeros, report.underflow, report.sqnr_db, report.cosine) == (100, 0, math.inf, 1)
    assert report.scale_log2 is None and report.histogram == {} and report.amax == 0


def test_tiny_gradients_do_not_vanish_from_the_sums():
    """Squares of fp32 values below 1e-19 are subnormal or zero."""
    x = weight(64, 256) * 1e-27
    report = report_of(tally(x, ops.quantize(x, "nvfp4_1x16").rowwise, 1)[0])
    expected = report_of(tally(x * 2.0**80, ops.quantize(x * 2.0**80, "nvfp4_1x16").rowwise, 1)[0])
    assert math.isfinite(expected.sqnr_db) and report.sqnr_db == pytest.approx(expected.sqnr_db, abs=0.1)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("columnwise", (False, True), ids=("rowwise", "columnwise"))
@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_values_that_are_not_finite(fmt, columnwise, value):
    x = weight(40, 200)
    x[7, 11] = value
    found, _ = tally(x, copy_of(x, fmt, columnwise), 5, columnwise=columnwise)
    assert found.counts[NONFINITE] == 1 and found.maxima[FIRST_NONFINITE] == -5
    assert math.isnan(report_of(found).sqnr_db)


def test_merging_is_tallying_together():
    x, y = weight(64, 256), 8 * weight(64, 256, seed=1)
    parts = [tally(t, ops.quantize(t, "fp8_1x128").rowwise, order)[0] for order, t in enumerate((x, y))]
    both = torch.cat((x, y))
    whole, _ = tally(both, ops.quantize(both, "fp8_1x128").rowwise, 0)
    total = Tally.empty(x.device, 2).at(1)
    for part in parts:
        total.merge(part)
    assert torch.equal(total.counts, whole.counts) and torch.equal(total.maxima, whole.maxima)
    close(total.sums.tolist(), whole.sums.tolist())


# --- gradients of weights ---------------------------------------------------------------------------------------------


def test_the_norm_of_a_gradient_is_estimated():
    """Over seeds the mean square is the norm's, and one estimate is within a quarter or so."""
    x, dy = weight(500, 60), weight(500, 80, seed=1)
    expected = (dy.double().mT @ x.double()).norm().item()
    estimates = []
    for seed in range(0, 90, 3):
        probes = statistics.gradient_probes(
            statistics.project(x, seed), statistics.project(dy, seed + 1), None, seed + 2, 0
        )
        estimates.append(probes.square().mean().item())
    assert math.sqrt(sum(estimates) / len(estimates)) == pytest.approx(expected, rel=0.15)
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

    def probes(x, dy, first_x=0, first_dy=0, ends=None, first_group=0):
        groups = None if ends is None else formats.Groups(torch.tensor(ends, dtype=torch.int32))
        projected = statistics.project(x, 0, first_x), statistics.project(dy, 1, first_dy)
        return statistics.gradient_probes(*projected, groups, 2, first_group)

    def same(got, expected):
        # Projections are sums in fp32.
        assert relative_error(got, expected) < 1e-6

    whole = probes(x, dy)
    same(probes(x[:15], dy[:15]) + probes(x[15:], dy[15:]), whole)
    same(probes(x[:, :32], dy) + probes(x[:, 32:], dy, first_x=32), whole)
    same(probes(x, dy[:, :32]) + probes(x, dy[:, 32:], first_dy=32), whole)
    grouped = probes(x, dy, ends=(10, 10, 25))
    here, there = probes(x[:10], dy[:10], ends=(10, 10)), probes(x[10:], dy[10:], ends=(15,), first_group=2)
    same(here + there, grouped)


def test_the_norm_over_experts_is_that_of_all_their_gradients():
    x, dy, ends = weight(300, 60), weight(300, 80, seed=1), (100, 220, 280)
    groups = formats.Groups(torch.tensor(ends, dtype=torch.int32))
    squares = [(dy[a:b].T @ x[a:b]).double().square().sum().item() for a, b in zip((0, *ends), ends)]
    estimates = []
    for seed in range(0, 90, 3):
        projected = statistics.project(x, seed), statistics.project(dy, seed + 1)
        estimates.append(statistics.gradient_probes(*projected, groups, seed + 2, 0).square().mean().item())
    assert math.sqrt(sum(estimates) / len(estimates)) == pytest.approx(math.sqrt(sum(squares)), rel=0.15)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_noise_of_a_gradient(fmt):
    """Beside the noise that is really there: errors of tokens are nearly independent."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, n, generator=generator) for n in (96, 160))
    decoded, tokens = [], []
    for t in (x, dy):
        copy = ops.quantize(t, fmt, rowwise=False, columnwise=True).columnwise
        decoded.append(ops.dequantize(copy).mT.double())
        tokens.append(tally(t, copy, 0, columnwise=True)[1])
    true = (decoded[1].mT @ decoded[0] - dy.double().mT @ x.double()).square().sum()
    assert statistics.gradient_noise(*tokens).item() == pytest.approx(true.item(), rel=0.1)


class NothingRead(TorchDispatchMode):
    """Fails where the host reads a value, or asks for a shape that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("grouped", (False, True), ids=("plain", "grouped"))
def test_the_host_reads_nothing(fmt, grouped):
    x, ends = weight(60, 96), torch.tensor((10, 10, 25), dtype=torch.int32)
    groups = formats.Groups(ends) if grouped else None
    copies = ops.quantize_by(x, formats.CastOptions(formats.get_format(fmt), True, True), groups)
    with NothingRead():
        tally(x, copies.rowwise, 1, groups=groups)[0].merge(Tally.empty(x.device))
        _, tokens = tally(x, copies.columnwise, 1, columnwise=True, groups=groups)
        projected = statistics.project(x, 3)
        statistics.gradient_probes(projected, projected, groups, 5, 0)
        statistics.gradient_noise(tokens, tokens)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingRead():
        x.sum().item()
