"""Statistics of quantization errors that can be accumulated over passes and ranks.

A high-precision tensor and its quantized copy give a `Tally` of sums and maxima. Everything is computed on the tensor's
device, without synchronization, and in chunks of rows to save memory. `Tallies` of all layers become a report with one
sum over ranks and one copy to the host.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchao_blockwise.diagnostics.records import KINDS, GradientReport, Report, TensorReport
from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_rows
from torchao_blockwise.ops.quantization.reference import expand_blocks, value_of_blocks

# Indices into the two tensors of a tally. VALUES, DECODED and ERROR are squares; the histogram of scales comes last.
ELEMENTS, ZEROS, UNDERFLOWS, SATURATED, NONFINITE, VALUES, DECODED, ERROR, HISTOGRAM = range(9)
AMAX, LARGEST_SCALE, SMALLEST_SCALE, FIRST_NONFINITE = range(4)

# One bin for each power of two in fp32; scale s is in bin e + 127 for 2^e <= s < 2^(e+1).
BINS, EXPONENT_BIAS, _MANTISSA_BITS = 256, 127, 23
SUMS, MAXIMA, PROBES = HISTOGRAM + BINS, 4, 64
# A value counts as clipped if it exceeds the largest element by more than the rounding error of a scale in fp32.
_CLIPPED = 1 + 2.0**-12
_CHUNK = 2**24
_MAGNITUDE = 2**31 - 1


class Tally(NamedTuple):
    """Statistics of one or more tensors; `merge` adds tallies.

    sums: f64 [.., SUMS], in which counts are exact. maxima: f64 [.., MAXIMA], fp32 magnitudes read as integers, which
        keep the order and put NaN above all; minima are negated, and -inf stands for no values.
    """

    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device, *shape: int) -> Tally:
        """Return empty tallies of this shape."""
        sums = torch.zeros((*shape, SUMS), dtype=torch.float64, device=device)
        maxima = torch.zeros((*shape, MAXIMA), dtype=torch.float64, device=device)
        maxima[..., SMALLEST_SCALE:] = -math.inf
        return cls(sums, maxima)

    def merge(self, other: Tally) -> None:
        """Add `other` in place."""
        self.sums.add_(other.sums)
        torch.maximum(self.maxima, other.maxima, out=self.maxima)


def tally(
    x: torch.Tensor, copy: Operand, order: int, *, columnwise: bool = False, groups: Groups | None = None
) -> tuple[Tally, torch.Tensor]:
    """Return the tally of the error of `copy`, and f64 [2, M] with Σ value² and Σ error² for each token.

    x: [.., M, K] bf16 | f16 | f32. copy: the rowwise result of `ops.quantize` for `x`, or with `columnwise` the
        columnwise one; may be quantized in `groups`, then rows after the last group are not counted.
    order: increases with time, to find the first tensor with NaN or Inf.
    NaN and Inf are counted, and make the sums NaN.
    """
    result = Tally.empty(x.device)
    tokens = result.sums.new_zeros(2, x.shape[-2])
    if x.dim() == 2:
        return result, tokens + _tally_matrix(x, copy, order, columnwise, groups, result)
    matrices, qdata, scale = (t.flatten(0, -3) for t in (x, copy.qdata, copy.scale))
    factor = copy.global_scale
    for i, matrix in enumerate(matrices):
        of_matrix = factor if factor is None or not factor.dim() else factor.flatten()[i]
        one = copy._replace(qdata=qdata[i], scale=scale[i], global_scale=of_matrix)
        tokens += _tally_matrix(matrix, one, order, columnwise, None, result)
    return result, tokens


def _tally_matrix(
    x: torch.Tensor, copy: Operand, order: int, columnwise: bool, groups: Groups | None, result: Tally
) -> torch.Tensor:
    """Add x [M, K] to `result`."""
    fmt, factor, source, counted = copy.format, copy.global_scale, None, None
    if groups is not None:
        counted = torch.arange(x.shape[0], device=x.device) < clamped_ends(groups.ends, x.shape[0])[-1]
        counted = counted[None] if columnwise else counted[:, None]
        source = padded_rows(groups.ends, x.shape[0], fmt.block[1]) if columnwise else None
        if factor is not None:
            # Expanded to the grid of block scales.
            factor = value_of_blocks(factor, x.shape[0], groups.ends, fmt.block[1], columnwise)
    scale = copy.scale.float() if factor is None else copy.scale.float() * factor
    grid = scale.mT if fmt.transposed_scales else scale
    matrix = x.mT if columnwise else x
    step = max(1, _CHUNK // max(1, matrix.shape[1]) // fmt.block[0]) * fmt.block[0]
    by_token = result.sums.new_zeros(2, x.shape[0])
    for start in range(0, matrix.shape[0], step):
        values = matrix[start : start + step].float()
        first = start // fmt.block[0]
        elements = fmt.element.decode(copy.qdata[start : start + step], copy.qdata.shape[-1] * fmt.element.per_byte)
        rows = grid[first : first + fmt.grid(*elements.shape)[0]]
        decoded, is_largest = elements * expand_blocks(rows, fmt, *elements.shape), elements.abs() == fmt.element.max
        if source is not None:
            # From padded groups back to tokens.
            decoded, is_largest = (
                t.new_zeros(len(t), x.shape[0] + 1).index_copy(1, source, t) for t in (decoded, is_largest)
            )
        # There may be padding after the last column.
        decoded, is_largest = (t[:, : values.shape[1]] for t in (decoded, is_largest))
        part = slice(start, start + step)
        inside = counted if counted is None or columnwise else counted[part]
        if inside is not None:
            values, decoded = (t.masked_fill(~inside, 0) for t in (values, decoded))
        error = values - decoded
        _add_elements(result, values, decoded, is_largest, inside)
        squares = [torch.linalg.vector_norm(t, dim=1 - columnwise, dtype=torch.float64) for t in (values, error)]
        by_token[:, slice(None) if columnwise else part] += torch.stack(squares).square()
    result.sums[VALUES : ERROR + 1 : ERROR - VALUES] += by_token.sum(1)
    first_bad = torch.where(result.sums[NONFINITE] > 0, -order, result.maxima[FIRST_NONFINITE])
    result.maxima[FIRST_NONFINITE] = torch.maximum(result.maxima[FIRST_NONFINITE], first_bad)
    _add_scales(result, copy, scale)
    return by_token


def _add_elements(
    result: Tally, values: torch.Tensor, decoded: torch.Tensor, is_largest: torch.Tensor, inside: torch.Tensor | None
) -> None:
    if not values.numel():
        return
    zero, magnitude = values == 0, values.abs()
    count = torch.full_like(result.sums[0], values.numel())
    if inside is not None:
        zero, count = zero & inside, inside.sum() * (values.numel() // inside.numel())
    underflow = (decoded == 0) & (values != 0)
    saturated = is_largest & (magnitude > decoded.abs() * _CLIPPED)
    found = [count, *(t.sum() for t in (zero, underflow, saturated, ~values.isfinite()))]
    result.sums[: NONFINITE + 1] += torch.stack(found)
    result.sums[DECODED] += torch.linalg.vector_norm(decoded, dtype=torch.float64).square()
    # The maximum may be a NaN with a sign bit.
    amax = (magnitude.max().view(torch.int32) & _MAGNITUDE).double()
    result.maxima[AMAX] = torch.maximum(result.maxima[AMAX], amax)


def _add_scales(result: Tally, copy: Operand, scale: torch.Tensor) -> None:
    """Add decoded block scales; blocks of zeros, which include padding, go to bin 0 and not into the extremes."""
    if not scale.numel():
        return
    fmt, zero = copy.format, scale.new_zeros(())
    # The larger of the scales that the two ways of rounding give.
    of_zeros = fmt.compute_scales(zero, zero + 1 if fmt.has_global_scale else None, fmt.has_power_of_2_scales).scale
    is_zero = (copy.scale.float() <= of_zeros.float()).flatten()
    bits = (scale.flatten().view(torch.int32) & _MAGNITUDE).long()
    bins = (bits >> _MANTISSA_BITS).masked_fill(is_zero, 0)
    result.sums[HISTOGRAM:].scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
    extremes = torch.stack([bits, -bits]).double().masked_fill(is_zero, -math.inf).amax(1)
    result.maxima[LARGEST_SCALE : SMALLEST_SCALE + 1].clamp_(min=extremes)


# --- the gradient of a weight -----------------------------------------------------------------------------------------
# dw = Σ over tokens of dy · x. Its norm is estimated from random projections, which can be summed over tokens, passes
# and ranks as gradients are: with random signs u, v and r, s = Σ r · (u·dy) · (v·x) has the mean square |dw|². That
# takes a few floats for each token; dw itself would take a high-precision GEMM and a saved x.


def project(x: torch.Tensor, seed: int, first: int = 0) -> torch.Tensor:
    """Return x [T, K] @ random signs [K, PROBES], f32. first: the index of the first column, if x is split."""
    signs = _signs(torch.arange(first, first + x.shape[1], device=x.device), seed)
    step = max(1, _CHUNK // max(1, x.shape[1]))
    parts = [x[start : start + step].float() @ signs for start in range(0, x.shape[0], step)]
    return torch.cat(parts) if parts else signs.new_zeros(0, PROBES)


def gradient_probes(
    x: torch.Tensor, dy: torch.Tensor, groups: Groups | None, seed: int, first_group: int
) -> torch.Tensor:
    """Return Σ over tokens of r · dy · x for projections [T, PROBES], f64 [PROBES].

    r: a random sign for each group, 0 for tokens in no group.
    """
    products = dy.double() * x.double()
    if groups is not None:
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        ends = clamped_ends(groups.ends, x.shape[0])
        group = torch.searchsorted(ends, tokens, right=True)
        signs = _signs(group + first_group, seed).double()
        products = torch.where((group < ends.numel())[:, None], products * signs, 0)
    return products.sum(0)


def gradient_noise(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return Σ |error|² in dw from quantizing x and dy, if errors of tokens are independent; f64.

    x, dy: squares for each token, as returned by `tally`.
    """
    return (dy[1] * x[0] + dy[0] * x[1]).sum()


def _signs(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ±1, f32 [n, PROBES], from bits of a hash of index and seed."""
    start = (seed + 1) * 0x2545F4914F6CDD1D % 2**63
    mixed = (index.long() + 1) * 0x1E3779B97F4A7C15 + start
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D), (33, 1)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (mixed[:, None] >> torch.arange(PROBES, device=index.device)) & 1
    return (2 * bits - 1).float()


# --- all layers -------------------------------------------------------------------------------------------------------


class Tallies:
    """Tallies for layers × kinds of tensors × recipes, and for each layer the sums for its gradient and noise.

    trained: the recipe that each converted layer trains with.
    """

    def __init__(
        self, names: Sequence[str], recipes: Sequence[str], trained: Mapping[str, str], device: torch.device
    ) -> None:
        self.index = {name: i for i, name in enumerate(names)}
        self.recipes, self.trained, self.device = list(recipes), dict(trained), device
        self._clear()

    def _clear(self) -> None:
        layers, recipes = len(self.index), len(self.recipes)
        self._all = Tally.empty(self.device, layers, len(KINDS), recipes)
        self._probes, self._noise = (self._all.sums.new_zeros(layers, n) for n in (PROBES, recipes))

    def add(self, layer: str, kind: str, recipe: str, tally: Tally) -> None:
        index = self.index[layer], KINDS.index(kind), self.recipes.index(recipe)
        Tally(*(t[index] for t in self._all)).merge(Tally(*(t.to(self.device) for t in tally)))

    def add_gradient(self, layer: str, probes: torch.Tensor, noise: Mapping[str, torch.Tensor]) -> None:
        """probes: from `gradient_probes`. noise: by recipe, from `gradient_noise`."""
        index = self.index[layer]
        self._probes[index] += probes.to(self.device)
        for recipe, value in noise.items():
            self._noise[index, self.recipes.index(recipe)] += value.to(self.device)

    def take(self, step: int, group: dist.ProcessGroup | None) -> Report:
        """Return the report of everything that all ranks have added, and reset the tallies."""
        tensors = self._all.sums, self._probes, self._noise, self._all.maxima
        added, maxima = torch.cat([t.flatten() for t in tensors[:3]]), tensors[3].flatten()
        if group is not None:
            dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        on_host = torch.cat((added, maxima)).cpu().split([t.numel() for t in tensors])
        sums, probes, noise, maxima = (part.view(t.shape) for part, t in zip(on_host, tensors))
        self._clear()
        found = [
            tensor_report(layer, kind, recipe, self.trained.get(layer) == recipe, Tally(sums[i, k, r], maxima[i, k, r]))
            for layer, i in self.index.items()
            for k, kind in enumerate(KINDS)
            for r, recipe in enumerate(self.recipes)
            if sums[i, k, r, ELEMENTS]
        ]
        with_gradient = {(t.layer, t.recipe) for t in found if t.tensor == "dy"}
        gradients = self._gradients(probes.square().mean(1).tolist(), noise.tolist(), with_gradient)
        first = maxima[..., FIRST_NONFINITE]
        where = None
        if first.numel() and first.max() > -math.inf:
            layer, kind, _ = (int(i) for i in torch.unravel_index(first.argmax(), first.shape))
            where = list(self.index)[layer], KINDS[kind].split()[0]
        return Report(step, tuple(found), tuple(gradients), where)

    def _gradients(
        self, squares: list[float], noise: list[list[float]], seen: set[tuple[str, str]]
    ) -> list[GradientReport]:
        found: list[GradientReport] = []
        as_trained: list[tuple[float, float]] = []
        for r, recipe in enumerate(self.recipes):
            layers = {name: (squares[i], noise[i][r]) for name, i in self.index.items() if (name, recipe) in seen}
            for name, of_layer in layers.items():
                trains = self.trained.get(name) == recipe
                found.append(GradientReport(name, recipe, trains, _ratio([of_layer])))
                as_trained += [of_layer] if trains else []
            found.append(GradientReport("", recipe, False, _ratio(list(layers.values()))))
        return [*found, GradientReport("", "", True, _ratio(as_trained))] if self.trained else found


def tensor_report(layer: str, kind: str, recipe: str, trains: bool, tally: Tally) -> TensorReport:
    """Compute the report of one tensor from its tally."""
    sums, maxima = (t.tolist() for t in tally)
    elements, *counts, nonfinite = map(int, sums[:VALUES])
    zeros, underflow, saturated = (100 * count / elements for count in counts)
    # Bin 0 holds blocks of zeros, the last one NaN and Inf.
    bins = enumerate(sums[HISTOGRAM + 1 : -1], 1 - EXPONENT_BIAS)
    bits = [0 if math.isinf(number) else abs(int(number)) for number in maxima[:3]]
    amax, largest, smallest = struct.unpack("3f", struct.pack("3I", *bits))
    has_scales = smallest > 0 and math.isfinite(largest)
    ratio = _quotient(sums[VALUES], sums[ERROR])
    return TensorReport(
        layer=layer,
        tensor=kind.split()[0],
        direction=kind.partition(" ")[2] or "both",
        recipe=recipe,
        trains=trains,
        elements=elements,
        nonfinite=nonfinite,
        amax=amax,
        zeros=zeros,
        underflow=underflow,
        saturated=saturated,
        scale_log2=(math.log2(smallest), math.log2(largest)) if has_scales else None,
        histogram={e: int(blocks) for e, blocks in bins if blocks},
        sqnr_db=10 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan,
        cosine=_cosine(sums[VALUES], sums[DECODED], sums[ERROR]),
    )


def _quotient(value: float, by: float) -> float:
    return math.inf if by == 0 else value / by


def _ratio(squares: Sequence[tuple[float, float]]) -> float:
    """Return the norm of gradients over the norm of their noise."""
    square, noise = (sum(values) for values in zip(*squares)) if squares else (0.0, 0.0)
    return math.nan if square == noise == 0 else math.sqrt(_quotient(square, noise))


def _cosine(values: float, decoded: float, error: float) -> float:
    """x·y = (|x|² + |y|² - |x - y|²) / 2."""
    if math.isnan(values * decoded):
        return math.nan
    if values * decoded <= 0:
        return 1.0 if error == 0 else 0.0
    return (values + decoded - error) / (2 * math.sqrt(values * decoded))
