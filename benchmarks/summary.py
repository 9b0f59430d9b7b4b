"""Tables of docs/performance.md and docs/moe.md from the JSON files of benchmarks/results.

Ratios and their ranges over shapes, routings and the like; needs nothing but the files. Writes
benchmarks/results/summary_<name>.md, which the pages show.

    python benchmarks/summary.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from summaries import experts, joules, kernels, layers
from summaries.cells import Results

RESULTS = Path(__file__).resolve().parent / "results"
TABLES: dict[str, Callable[[Results], str]] = {
    "grad_weight": kernels.grad_weight,
    "joules": joules.products,
    "joules_step": joules.step,
    "kernels": kernels.kernels,
    "layers": layers.layers,
    "moe_memory": experts.memory,
    "moe_peers": experts.peers,
    "moe_speed": experts.speed,
}


def texts(results: Results) -> dict[str, str]:
    """{name of the file without .md: its text}."""
    return {f"summary_{name}": make(results) + "\n" for name, make in TABLES.items()}


def main() -> int:
    for name, text in texts(Results(RESULTS)).items():
        path = RESULTS / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
