"""Tables of ratios from the JSON files of benchmarks/results; and all results that README.md and pages of docs/ show.

Ratios and their ranges over shapes, routings and the like; needs nothing but the files. Writes
benchmarks/results/summary_<name>.md, then the pages, between `<!-- results: name -->` and `<!-- end of results -->`.

    python benchmarks/summary.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from summaries import convergence, experts, graphs, joules, kernels, layers, sharding
from summaries.cells import Results
from summaries.pages import filled, pages
from summaries.sources import footnote

RESULTS = Path(__file__).resolve().parent / "results"


class Table(NamedTuple):
    """What makes it, and the results that it is made of; empty where its rows link to theirs."""

    make: Callable[[Results], str]
    sources: tuple[str, ...] = ()


TABLES = {
    "convergence": Table(convergence.gaps, (convergence.NAME,)),
    "convergence_nvfp4": Table(convergence.nvfp4_parts, (convergence.NVFP4,)),
    "fsdp": Table(sharding.fsdp, sharding.NAMES),
    "grad_weight": Table(kernels.grad_weight, (kernels.GROUPED,)),
    "graphs": Table(graphs.ways, (graphs.NAME,)),
    "joules": Table(joules.products, (joules.MATMUL,)),
    "joules_step": Table(joules.step, (joules.MODEL,)),
    "kernels": Table(kernels.kernels),
    "layers": Table(layers.layers),
    "moe_memory": Table(experts.memory, (experts.RUN, experts.PEERS)),
    "moe_peers": Table(experts.peers, (experts.PEERS,)),
    "moe_speed": Table(experts.speed, (experts.RUN,)),
}


def texts(results: Results) -> dict[str, str]:
    """{name of the file without .md: its text}."""
    made = {}
    for name, (make, sources) in TABLES.items():
        parts = [make(results), footnote(results, sources)]
        made[f"summary_{name}"] = "\n\n".join(filter(None, parts)) + "\n"
    return made


def main() -> int:
    for name, text in texts(Results(RESULTS)).items():
        path = RESULTS / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    for page in pages(RESULTS.parents[1]):
        text = filled(page, RESULTS)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
