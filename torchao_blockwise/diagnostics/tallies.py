"""Tallies of all layers on the device, and their report, made with one sum over ranks and one copy to the host."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchao_blockwise.diagnostics import statistics
from torchao_blockwise.diagnostics.records import KINDS, GradientReport, Report, TensorReport
from torchao_blockwise.diagnostics.statistics import DECODED, ERROR, HISTOGRAM, PROBES, VALUES, Tally


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
        """probes: from `statistics.gradient_probes`. noise: by recipe, from `statistics.gradient_noise`."""
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
            if sums[i, k, r, statistics.ELEMENTS]
        ]
        with_gradient = {(t.layer, t.recipe) for t in found if t.tensor == "dy"}
        gradients = self._gradients(probes.square().mean(1).tolist(), noise.tolist(), with_gradient)
        first = maxima[..., statistics.FIRST_NONFINITE]
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
    bins = enumerate(sums[HISTOGRAM + 1 : -1], 1 - statistics.EXPONENT_BIAS)
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
