"""A study: runs that differ in recipe or in one bit of their start, and the gap to bf16 that they give.

All runs of a seed fork from one bf16 state. Of each recipe there are draws: draw 0 starts from that state, each other
draw moves every weight by one bit first, up or down at random. The spread of draws is what chance does to a loss, and
the interval of a gap follows from it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.report import markdown

from llm_training.config import RunConfig, UsageError, difference, override
from llm_training.recipes import RECIPES

BASE = "bf16"
METRICS = {"last_third": "training loss of the last third", "held_out_loss": "held-out loss"}
# Student's t for 95 %, two-sided, by degrees of freedom from 1; beyond, a normal distribution's and 2.4 / degrees.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_CURVE_POINTS = 200


class Run(NamedTuple):
    """One run of a study."""

    recipe: str
    seed: int
    draw: int

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.seed}-{self.draw}"


@dataclass(frozen=True)
class Study:
    """The runs of a study file, in the order in which they are trained.

    {"preset": "25m", "steps": 16000, "bf16_steps": 1600, "seeds": [0], "draws": {"bf16": 4, "fp8": 3}, "at_once": 3}

    bf16_steps: of the start. draws: of each recipe. at_once: how many runs share a GPU. Other keys are of `RunConfig`.
    Raises UsageError for a file that is not a study.
    """

    name: str
    config: RunConfig
    seeds: tuple[int, ...]
    draws: Mapping[str, int]
    at_once: int

    @classmethod
    def read(cls, path: Path) -> Study:
        try:
            content = json.loads(path.read_text())
            seeds, draws = content.pop("seeds"), content.pop("draws")
            at_once = content.pop("at_once", 1)
            config = override(content.pop("preset"), **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"--study {path}: not a study ({reason}); see benchmarks/studies for examples") from None
        unknown = sorted(draws.keys() - RECIPES.keys())
        if unknown or draws.get(BASE, 0) < 2:
            wrong = f"unknown recipes {', '.join(unknown)}" if unknown else f"fewer than two draws of {BASE}"
            raise UsageError(f"--study {path}: {wrong}; the recipes are {', '.join(RECIPES)}")
        return cls(path.stem, config, tuple(seeds), draws, at_once)

    def runs(self) -> list[Run]:
        """Draw by draw, so that an answer comes early and becomes sharper."""
        most = max(self.draws.values())
        return [
            Run(recipe, seed, draw)
            for seed in self.seeds
            for draw in range(most)
            for recipe, draws in self.draws.items()
            if draw < draws
        ]

    def config_of(self, seed: int) -> RunConfig:
        return replace(self.config, seed=seed)


# --- results ----------------------------------------------------------------------------------------------------------


def run_of(record: Mapping[str, Any]) -> Run:
    return Run(record["recipe"], record["seed"], record["draw"])


def merged(contents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The starts and runs of several results of one study; of two that have the same start and run the first.

    Raises UsageError where they differ in configuration.
    """
    out: dict[str, Any] = {"config": None, "starts": {}, "runs": []}
    seen = set()
    for content in contents:
        out["config"] = out["config"] or content["config"]
        if fields := difference(content["config"], out["config"]):
            differs = "; ".join(fields)
            raise UsageError(f"results of other configurations cannot be merged: {differs}; use another study file")
        out["starts"] |= content["starts"]
        for record in content["runs"]:
            key = record["start"], run_of(record)
            if key not in seen:
                seen.add(key)
                out["runs"].append(record)
    return out


def missing_runs(study: Study, records: Sequence[Mapping[str, Any]], starts: Mapping[int, str]) -> list[Run]:
    """The runs that are to be trained, from starts {seed: digest}; a start that is lost cannot be trained from again.

    A new start needs its own draws of bf16, two at least, besides what no other start has.
    """
    done = {run_of(record) for record in records}
    here = {run_of(record) for record in records if starts.get(record["seed"]) == record["start"]}
    out = []
    for seed in study.seeds:
        wanted = [run for run in study.runs() if run.seed == seed and run not in done]
        base = [Run(BASE, seed, draw) for draw in range(2)]
        if wanted:
            out += [run for run in dict.fromkeys((*base, *wanted)) if run not in here]
    return out


def record_of(run: Run, start: str, result: Any, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a finished run; `result` as `train` returns it. Losses are None where it diverged.

    last_third: mean training loss of the last third of the steps. curve: means of the training loss over equal parts.
    """
    losses, span = result.losses, max(1, len(result.losses) // _CURVE_POINTS)
    third = statistics.fmean(losses[-max(1, len(losses) // 3) :])
    return {
        **run._asdict(),
        "start": start,
        "layers": result.layers,
        "last_third": third if math.isfinite(third) else None,
        "held_out_loss": None if result.diverged else result.held_out_loss,
        "tokens_per_second": result.tokens_per_second,
        "seconds": sum(result.seconds[result.bf16_steps :]),
        "peak_bytes": result.peak_bytes,
        "curve": None
        if result.diverged
        else [statistics.fmean(losses[i : i + span]) for i in range(0, len(losses), span)],
        "environment": dict(made_by),
    }


# --- the answer -------------------------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """A recipe's loss above another's, in %, and half the width of its 95 % interval; None where spread is unknown.

    runs: of the recipe.
    """

    mean: float
    half_width: float | None
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} %" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")


def _from_each_start(records: Sequence[Mapping[str, Any]], metric: str, *recipes: str) -> list[list[list[float]]]:
    """For each start, each recipe's losses above the mean of the first recipe's, in %, where all of them have some."""
    out = []
    for start in dict.fromkeys(record["start"] for record in records):
        own = [r for r in records if r["start"] == start and r[metric] is not None]
        losses = [[r[metric] for r in own if r["recipe"] == recipe] for recipe in recipes]
        if all(losses):
            level = statistics.fmean(losses[0])
            out.append([[100 * (x / level - 1) for x in values] for values in losses])
    return out


def _spread(records: Sequence[Mapping[str, Any]], metric: str) -> tuple[float | None, int]:
    """Standard deviation of the draws around the mean of their recipe and start, in %, and its degrees of freedom."""
    recipes = dict.fromkeys(record["recipe"] for record in records)
    samples = [values for recipe in recipes for (values,) in _from_each_start(records, metric, recipe)]
    degrees = sum(len(values) - 1 for values in samples)
    return math.sqrt(sum(x**2 for values in samples for x in values) / degrees) if degrees else None, degrees


def gap(records: Sequence[Mapping[str, Any]], recipe: str, metric: str, base: str = BASE) -> Gap | None:
    """The gap of a recipe to `base`, start by start; None where no start has runs of both.

    The spread is that of the draws of all recipes together, over all starts.
    """
    groups = _from_each_start(records, metric, base, recipe)
    if not groups:
        return None
    mean = statistics.fmean(statistics.fmean(own) for _, own in groups)
    runs = sum(len(own) for _, own in groups)
    deviation, degrees = _spread(records, metric)
    if deviation is None:
        return Gap(mean, None, runs)
    error = deviation * math.sqrt(sum(1 / len(values) for group in groups for values in group)) / len(groups)
    return Gap(mean, quantile(degrees) * error, runs)


def growth(points: Sequence[tuple[float, Gap]]) -> Gap | None:
    """The slope of gaps over log10 of their sizes [(size, gap)], with its 95 % interval; None without two sizes.

    A line by least squares, each gap weighted by 1 / half_width², as if these were standard deviations of a normal
    distribution times 1.96. runs: of all gaps.
    """
    known = [(math.log10(size), gap.mean, gap.half_width**-2) for size, gap in points if gap.half_width]
    if len({x for x, _, _ in known}) < 2:
        return None
    total = sum(w for *_, w in known)
    center = sum(w * x for x, _, w in known) / total
    spread = sum(w * (x - center) ** 2 for x, _, w in known)
    slope = sum(w * (x - center) * y for x, y, w in known) / spread
    return Gap(slope, spread**-0.5, sum(gap.runs for _, gap in points))


def quantile(degrees: int) -> float:
    """Student's t below which 97.5 % lie."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees


def chance(records: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Standard deviation of the draws of bf16, in % of their mean, over all starts; None with fewer than two."""
    return _spread([record for record in records if record["recipe"] == BASE], metric)[0]


def table(study: Study, records: Sequence[Mapping[str, Any]]) -> str:
    """The present answer as a Markdown table, a row a recipe; recipes are compared over the same seeds only."""
    seeds = sorted({record["seed"] for record in records})
    columns = [(f"training loss above bf16, seed {seed}", "last_third", [seed]) for seed in seeds]
    columns = columns * (len(seeds) > 1) + [
        ("training loss above bf16", "last_third", seeds),
        ("held-out loss above bf16", "held_out_loss", seeds),
    ]
    rows = []
    for recipe in study.draws:
        own = [record for record in records if record["recipe"] == recipe]
        if not own:
            continue
        cells = [_cell(records, recipe, metric, wanted) for _, metric, wanted in columns]
        peaks = [record["peak_bytes"] for record in own if record["peak_bytes"] is not None]
        peak = f"{max(peaks) / 2**30:.2f} GiB" if peaks else "-"
        rows.append((recipe, str(len(own)), *cells, peak))
    return markdown(("recipe", "runs", *(title for title, *_ in columns), "peak memory"), rows)


def _cell(records: Sequence[Mapping[str, Any]], recipe: str, metric: str, seeds: Sequence[int]) -> str:
    """The gap over these seeds, where the recipe was run with each of them."""
    ran = {record["seed"] for record in records if record["recipe"] == recipe}
    if recipe == BASE or not ran.issuperset(seeds):
        return "-"
    return str(gap([record for record in records if record["seed"] in seeds], recipe, metric) or "-")
