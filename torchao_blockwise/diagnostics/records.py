"""Reports: statistics of each tensor for each recipe, and the layers that should stay in bf16."""

from __future__ import annotations

import math
import statistics as medians
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchao_blockwise.conversion.report import aligned

# FP4 training becomes less effective below about this ratio of gradient norm to quantization noise (arXiv 2505.19115).
LEAST_GRADIENT_TO_NOISE = math.sqrt(3)
# A layer is an outlier if its error is twice that of the median layer: 6 dB.
OUTLIER_DB = 20 * math.log10(2)
# A layer is also an outlier if a tensor loses most of its elements, and twice as many as in the median layer: if a few
# large values dominate the norm, SQNR does not show the loss of the others.
OUTLIER_UNDERFLOW = 50.0


# The tensors of a layer, and the directions of their blocks. Weights have square blocks: both copies are alike.
KINDS = ("x rowwise", "x columnwise", "w", "dy rowwise", "dy columnwise")


@dataclass(frozen=True)
class TensorReport:
    """Statistics of one tensor of one layer for one recipe, in one step.

    layer, tensor ("x", "w", "dy"), direction ("rowwise", "columnwise", "both"): identify the tensor.
    recipe: how it was quantized. trains: whether the layer trains with this recipe, or it is only one of `what_if`.
    elements, nonfinite: the number of elements, and of those that are NaN or Inf. amax: the largest magnitude.
    zeros, underflow, saturated: percent of the elements that are zero, that become zero, and that are clipped.
    scale_log2: (smallest, largest) log2 of block scales, None if all blocks are zero.
    histogram: {e: number of blocks with a scale in [2^e, 2^(e+1))}.
    sqnr_db: 10 log10(Σ x² / Σ error²). cosine: the cosine similarity of the tensor and its decoded copy.
    """

    layer: str
    tensor: str
    direction: str
    recipe: str
    trains: bool
    elements: int
    nonfinite: int
    amax: float
    zeros: float
    underflow: float
    saturated: float
    scale_log2: tuple[float, float] | None
    histogram: dict[int, int]
    sqnr_db: float
    cosine: float

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.tensor if self.tensor == "w" else f"{self.tensor} {self.direction}"


@dataclass(frozen=True)
class GradientReport:
    """The norm of a weight's gradient divided by its noise from quantizing x and dy. layer: "" for all layers."""

    layer: str
    recipe: str
    trains: bool
    to_noise: float


@dataclass(frozen=True)
class Recommendation:
    """A layer that should stay in bf16, and the reason."""

    layer: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The report of one step. Print it for a table of the layers that lose most; `to_dict()` returns the data.

    first_nonfinite: the (layer, tensor) that had NaN or Inf first, or None.
    """

    step: int
    tensors: tuple[TensorReport, ...]
    gradients: tuple[GradientReport, ...]
    first_nonfinite: tuple[str, str] | None

    @property
    def gradient_to_noise(self) -> float:
        """The ratio for all layers that train in low precision together; NaN if there are none."""
        return next((g.to_noise for g in self.gradients if g.trains and not g.layer), math.nan)

    def what_if(self, recipe: str) -> dict[str, float]:
        """Return {layer: the lowest SQNR in dB among its tensors} for training with `recipe`."""
        return {layer: min(t.sqnr_db for t in tensors) for layer, tensors in by_layer(self, recipe).items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values."""
        return asdict(self)

    def __str__(self) -> str:
        header = ("layer", "recipe", "worst tensor", "SQNR dB", "underflow %", "saturated %", "gradient / noise")
        noise = {g.layer: g.to_noise for g in self.gradients if g.trains}
        rows = []
        for layer, tensors in by_layer(self, None).items():
            worst = min(tensors, key=lambda t: _order(t.sqnr_db))
            figures = worst.sqnr_db, worst.underflow, worst.saturated, noise.get(layer, math.nan)
            rows.append((layer, worst.recipe, worst.kind, *(f"{figure:.2f}" for figure in figures)))
        rows.sort(key=lambda row: _order(float(row[3])))
        total = ("all", "", "", "", "", "", f"{self.gradient_to_noise:.2f}")
        bad = "" if self.first_nonfinite is None else f"; NaN or Inf first in {' '.join(self.first_nonfinite)}"
        return f"step {self.step}{bad}\n" + aligned(header, rows, total, words=3)


def by_layer(report: Report, recipe: str | None) -> dict[str, list[TensorReport]]:
    """Return the tensors of each layer for `recipe`; None is the recipe that the layer trains with."""
    found: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        if tensor.trains if recipe is None else tensor.recipe == recipe:
            found.setdefault(tensor.layer, []).append(tensor)
    return found


def _order(sqnr: float) -> float:
    return -math.inf if math.isnan(sqnr) else sqnr


def recommend(report: Report, recipe: str | None = None) -> list[Recommendation]:
    """Return the layers to keep in bf16 for `recipe`, or for the recipes that they train with, the worst first.

    These are layers with NaN or Inf; layers whose gradient is less than √3 times its quantization noise; and layers
    with a tensor that has 6 dB less SQNR (twice the error) than the same tensor of the median layer, or that loses more
    than half of its elements to zero, and twice as many as in the median layer.
    """
    layers = by_layer(report, recipe)
    noise = {g.layer: g.to_noise for g in report.gradients if (g.trains if recipe is None else g.recipe == recipe)}
    together = [t for tensors in layers.values() for t in tensors]
    medians_of, underflows = _medians(together, "sqnr_db"), _medians(together, "underflow")
    # Sorted by the kind of reason, then by severity.
    found: list[tuple[int, float, str, str]] = []
    for layer, tensors in layers.items():
        bad = next((t for t in tensors if t.nonfinite), None)
        ratio = noise.get(layer, math.nan)
        worst = max(tensors, key=lambda t: _behind(t, medians_of))
        behind = _behind(worst, medians_of)
        flushed = max(tensors, key=lambda t: t.underflow)
        if bad is not None:
            found.append((0, 0.0, layer, f"{bad.kind} has {bad.nonfinite} NaN or Inf"))
        elif ratio < LEAST_GRADIENT_TO_NOISE:
            found.append((1, ratio, layer, f"its gradient is {ratio:.2f} × its quantization noise, below √3"))
        elif behind > OUTLIER_DB:
            median = medians_of[worst.kind]
            reason = f"{worst.kind} has {worst.sqnr_db:.1f} dB SQNR, the median layer {median:.1f}"
            found.append((2, -behind, layer, reason))
        elif flushed.underflow > max(OUTLIER_UNDERFLOW, 2 * underflows[flushed.kind]):
            lost = f"{flushed.underflow:.0f} % of its elements to zero"
            reason = f"{flushed.kind} loses {lost}, the median layer {underflows[flushed.kind]:.0f} %"
            found.append((3, -flushed.underflow, layer, reason))
    return [Recommendation(layer, reason) for _, _, layer, reason in sorted(found, key=lambda item: item[:2])]


def _medians(tensors: Sequence[TensorReport], figure: str) -> dict[str, float]:
    """Return the median of a figure for each kind of tensor, without exact tensors (zeros, gradients of a sum)."""
    found: dict[str, list[float]] = {}
    for tensor in tensors:
        value = getattr(tensor, figure)
        if math.isfinite(value):
            found.setdefault(tensor.kind, []).append(value)
    return {kind: medians.median(values) for kind, values in found.items()}


def _behind(tensor: TensorReport, medians_of: dict[str, float]) -> float:
    """Return by how many dB a tensor is worse than the median."""
    median = medians_of.get(tensor.kind, math.nan)
    behind = median - tensor.sqnr_db
    # All tensors of this kind are exact.
    return -math.inf if math.isnan(behind) else behind
