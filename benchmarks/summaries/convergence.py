"""How far a billion parameters' training loss is from that of bf16, as they learn."""

from __future__ import annotations

import statistics
from itertools import pairwise

from summaries.cells import Results, table, whole

NAME = "convergence_1b_nvidia_h200"
PARTS = 6


def gaps(results: Results) -> str:
    """Percent above bf16 with the same seed, means of each sixth of the steps."""
    curves = {name: run["loss"] for name, run in results.load(NAME)["runs"].items()}
    # Without a run in bf16 of its seed a run has no gap.
    others = [name for name in curves if not name.startswith("bf16,") and _base(name) in curves]
    steps = min(map(len, curves.values()))
    ends = [steps * part // PARTS for part in range(PARTS + 1)]

    def cells(begin: int, end: int) -> list[str]:
        def gap(name: str) -> str:
            ours, bf16 = (statistics.fmean(curves[run][begin:end]) for run in (name, _base(name)))
            return f"{100 * (ours / bf16 - 1):+.2f} %"

        return [f"{whole(begin + 1)}–{whole(end)}", *map(gap, others)]

    return table(("steps", *others), (cells(*span) for span in pairwise(ends)))


def _base(name: str) -> str:
    """The run in bf16 with this one's seed."""
    return f"bf16,{name.split(',')[1]}"
