"""Tallies of all layers, on the device, and the report that comes of them: one sum over ranks, one copy to the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchao_blockwise.diagnostics import statistics
from torchao_blockwise.diagnostics.records import KINDS, GradientReport, Kind, Report, TensorReport
from torchao_blockwise.diagnostics.statistics import (
    AMAX,
    COUNTS,
    DECODED,
    ELEMENTS,
    ERROR,
    EXPONENT_BIAS,
    FIRST_NONFINITE,
    HISTOGRAM,
    LARGEST_SCALE,
    MAXIMA,
    NEVER,
    NONFINITE,
    PROBES,
    SATURATED,
    SMALLEST_SCALE,
    SUMS,
    UNDERFLOWS,
    VALUES,
    ZEROS,
    Tally,
)


class Tallies:
    """Of layers × kinds of tensors × recipes; and of layers, what their gradients and the noise in them add up to.

    trained: the recipe that each layer really trains by, of those that do.
    """

    def __init__(
        self, names: Sequence[str], recipes: Sequence[str], trained: Mapping[str, str], device: torch.device
    ) -> None:
        self.names, self.recipes, self.trained, self.device = list(names), list(recipes), dict(trained), device
        self._places: tuple[dict[object, int], ...] = tuple(
            {name: i for i, name in enumerate(axis)} for axis in (names, KINDS, recipes)
        )
        self._clear()

    def _clear(self) -> None:
        layers, recipes = len(self.names), len(self.recipes)
        self._all = Tally.empty(self.device, layers, len(KINDS), recipes)
        options = {"dtype": torch.float64, "device": self.device}
        self._probes = torch.zeros((layers, PROBES), **options)  # type: ignore[call-overload]
        self._noise = torch.zeros((layers, recipes), **options)  # type: ignore[call-overload]

    def index(self, layer: str) -> int:
        return self._places[0][layer]

    def add(self, layer: str, kind: Kind, recipe: str, tally: Tally) -> None:
        index = [places[name] for places, name in zip(self._places, (layer, kind, recipe))]
        self._all.at(*index).merge(Tally(*(t.to(self.device) for t in tally)))

    def add_gradient(self, layer: str, probes: torch.Tensor, noise: Mapping[str, torch.Tensor]) -> None:
        """probes: of `statistics.gradient_probes`. noise: by recipe, of `statistics.gradient_noise`."""
        index = self.index(layer)
        self._probes[index] += probes.to(self.device)
        for recipe, value in noise.items():
            self._noise[index, self._places[2][recipe]] += value.to(self.device)

    def take(self, step: int, group: dist.ProcessGroup | None) -> Report:
        """The report of what was added by all ranks; afterwards there is nothing again."""
        counts, maxima, sums = self._all
        added = torch.cat([t.flatten() for t in (sums, self._probes, self._noise)])
        if group is not None:
            dist.all_reduce(counts, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
        parts = counts.flatten(), maxima.flatten(), added.view(torch.int64)
        on_host = torch.cat(parts).cpu().split([part.numel() for part in parts])
        shape = len(self.names), len(KINDS), len(self.recipes)
        host_sums, probes, noise = (
            on_host[2].view(torch.float64).split([sums.numel(), self._probes.numel(), self._noise.numel()])
        )
        tally = Tally(on_host[0].view(*shape, COUNTS), on_host[1].view(*shape, MAXIMA), host_sums.view(*shape, SUMS))
        self._clear()
        tensors = self._tensors(tally)
        seen = {(t.layer, t.recipe) for t in tensors if t.tensor == "dy"}
        squares = probes.view(-1, PROBES).square().mean(1).tolist()
        gradients = self._gradients(squares, noise.view(len(self.names), len(self.recipes)).tolist(), seen)
        return Report(step, tuple(tensors), tuple(gradients), self._first_nonfinite(tally))

    def _tensors(self, tally: Tally) -> list[TensorReport]:
        counts, maxima, sums = (t.tolist() for t in tally)
        found = []
        for i, layer in enumerate(self.names):
            for k, kind in enumerate(KINDS):
                for r, recipe in enumerate(self.recipes):
                    if counts[i][k][r][ELEMENTS]:
                        trains = self.trained.get(layer) == recipe
                        numbers = counts[i][k][r], maxima[i][k][r], sums[i][k][r]
                        found.append(tensor_report(layer, kind, recipe, trains, *numbers))
        return found

    def _gradients(
        self, squares: list[float], noise: list[list[float]], seen: set[tuple[str, str]]
    ) -> list[GradientReport]:
        found, as_trained = [], [0.0, 0.0]
        for r, recipe in enumerate(self.recipes):
            total = [0.0, 0.0]
            for i, layer in enumerate(self.names):
                if (layer, recipe) not in seen:
                    continue
                trains = self.trained.get(layer) == recipe
                found.append(GradientReport(layer, recipe, trains, _ratio(squares[i], noise[i][r])))
                for sums in (total, *((as_trained,) if trains else ())):
                    sums[0] += squares[i]
                    sums[1] += noise[i][r]
            found.append(GradientReport("", recipe, False, _ratio(*total)))
        if self.trained:
            found.append(GradientReport("", "", True, _ratio(*as_trained)))
        return found

    def _first_nonfinite(self, tally: Tally) -> tuple[str, str] | None:
        first = tally.maxima[..., FIRST_NONFINITE]
        if not first.numel() or int(first.max()) == -NEVER:
            return None
        layer, kind, _ = (int(i) for i in torch.unravel_index(first.argmax(), first.shape))
        return self.names[layer], KINDS[kind].tensor


def tensor_report(
    layer: str, kind: Kind, recipe: str, trains: bool, counts: list[int], maxima: list[int], sums: list[float]
) -> TensorReport:
    """Figures of one tensor from its tally, as lists."""
    elements = counts[ELEMENTS]
    zeros, underflow, saturated = (100 * counts[i] / elements for i in (ZEROS, UNDERFLOWS, SATURATED))
    # Bin 0 holds blocks of zeros, the last one NaN and Inf.
    bins = counts[HISTOGRAM : HISTOGRAM + statistics.BINS]
    histogram = {e - EXPONENT_BIAS: bins[e] for e in range(1, statistics.BINS - 1) if bins[e]}
    extremes = _value_of(-maxima[SMALLEST_SCALE]), _value_of(maxima[LARGEST_SCALE])
    has_scales = maxima[SMALLEST_SCALE] != -NEVER and all(math.isfinite(s) and s > 0 for s in extremes)
    scale_log2 = (math.log2(extremes[0]), math.log2(extremes[1])) if has_scales else None
    ratio = _quotient(sums[VALUES], sums[ERROR])
    return TensorReport(
        layer,
        kind.tensor,
        kind.direction,
        recipe,
        trains,
        elements,
        counts[NONFINITE],
        _value_of(maxima[AMAX]),
        zeros,
        underflow,
        saturated,
        scale_log2,
        histogram,
        10 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan,
        _cosine(sums),
    )


def _value_of(bits: int) -> float:
    """The fp32 value of these bits."""
    return torch.tensor(bits if abs(bits) < 2**31 else 0, dtype=torch.int32, device="cpu").view(torch.float32).item()


def _quotient(value: float, by: float) -> float:
    if math.isnan(value) or math.isnan(by):
        return math.nan
    return value / by if by > 0 else math.inf


def _ratio(square: float, noise: float) -> float:
    return math.nan if square == noise == 0 else math.sqrt(_quotient(square, noise))


def _cosine(sums: list[float]) -> float:
    """x·y = (|x|² + |y|² - |x - y|²) / 2."""
    product = sums[VALUES] * sums[DECODED]
    if math.isnan(product):
        return math.nan
    if product <= 0:
        return 1.0 if sums[ERROR] == 0 else 0.0
    return (sums[VALUES] + sums[DECODED] - sums[ERROR]) / (2 * math.sqrt(product))
