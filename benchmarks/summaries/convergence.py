"""How far models' training loss is from that of bf16: a billion parameters' as they learn, NVFP4's parts at the end."""

from __future__ import annotations

import statistics
from itertools import pairwise

from summaries.cells import MISSING, Results, table, whole

NAME = "convergence_1b_nvidia_h200"
NVFP4 = "convergence_125m_after_500_nvidia_h200"
PARTS = 6


def gaps(results: Results) -> str:
    """Percent above bf16 with the same seed, means of each sixth of the steps."""
    curves = _curves(results, NAME)
    others = _compared(curves)
    steps = min(map(len, curves.values()))
    ends = [steps * part // PARTS for part in range(PARTS + 1)]

    def cells(begin: int, end: int) -> list[str]:
        return [f"{whole(begin + 1)}–{whole(end)}", *(_gap(curves, name, begin, end) for name in others)]

    return table(("steps", *others), (cells(*span) for span in pairwise(ends)))


def nvfp4_parts(results: Results) -> str:
    """Percent above bf16 with the same seed, means of the last third of the steps, a column a seed."""
    curves = _curves(results, NVFP4)
    compared = [name.split(", ") for name in _compared(curves)]
    steps = min(map(len, curves.values()))
    begin = steps - steps // 3
    seeds = sorted({seed for _, seed in compared})

    def cell(name: str) -> str:
        return _gap(curves, name, begin, steps) if name in curves else MISSING

    head = (f"steps {whole(begin + 1)}–{whole(steps)}", *seeds)
    recipes = dict.fromkeys(recipe for recipe, _ in compared)
    return table(head, ([recipe, *(cell(f"{recipe}, {seed}") for seed in seeds)] for recipe in recipes))


def _curves(results: Results, name: str) -> dict[str, list[float]]:
    return {run: written["loss"] for run, written in results.load(name)["runs"].items()}


def _compared(curves: dict[str, list[float]]) -> list[str]:
    """All but bf16 itself; without a run in bf16 of its seed a run has no gap."""
    return [name for name in curves if not name.startswith("bf16,") and _base(name) in curves]


def _gap(curves: dict[str, list[float]], name: str, begin: int, end: int) -> str:
    ours, bf16 = (statistics.fmean(curves[run][begin:end]) for run in (name, _base(name)))
    return f"{100 * (ours / bf16 - 1):+.2f} %"


def _base(name: str) -> str:
    """The run in bf16 with this one's seed."""
    return f"bf16,{name.split(',')[1]}"
