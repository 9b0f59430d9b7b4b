"""Tables of ratios and charts from the JSON files of benchmarks/results, and all results that README.md and docs/ show.

Ratios and their ranges over shapes, routings and the like. Writes
benchmarks/results/summary_<name>.md and chart_<name>.png, then the pages, between `<!-- results: name -->` and
`<!-- end of results -->`.

    python benchmarks/summary.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from summaries import charts, kernels, layers, runs, studies
from summaries.cells import Results
from summaries.sources import filled, footnote, pages

RESULTS = Path(__file__).resolve().parent / "results"


# Name -> what makes the table, and the results that it is made of; none where its rows link to theirs.
TABLES: dict[str, tuple[Callable[[Results], str], tuple[str, ...]]] = {
    "energy": (layers.energy, (layers.MODEL_H100,)),
    "loss_sizes": (studies.sizes, studies.STUDIES + studies.OTHERS),
    "loss_blocks": (studies.blocks, ()),
    "loss_tokens": (studies.tokens, ()),
    "loss_speeds": (studies.speeds, tuple(studies.SPEEDS.values())),
    "loss_nvfp4": (runs.nvfp4_parts, (runs.NVFP4,)),
    "fsdp": (runs.fsdp, runs.FSDP),
    "grad_weight": (kernels.grad_weight, (kernels.GROUPED,)),
    "gemms": (kernels.gemms, ()),
    "grad_weight_blocks": (kernels.squares, (kernels.SQUARES, kernels.GROUPED_SQUARES)),
    "graphs": (runs.graphs, (runs.GRAPHS,)),
    "headlines": (layers.headlines, ()),
    "kernels": (kernels.kernels, ()),
    "layers_experts": (layers.experts, ()),
    "layers_linear": (layers.linear, ()),
    "layers_models": (layers.models, ()),
    "layers_small": (layers.small, ()),
    "moe_memory": (layers.moe_memory, (layers.MOE, layers.MOE_PEERS)),
    "moe_peers": (layers.moe_peers, (layers.MOE_PEERS,)),
    "moe_speed": (layers.moe_speed, (layers.MOE,)),
}


def texts(results: Results) -> dict[str, str]:
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
    for path in charts.draw(Results(RESULTS), RESULTS):
        print(f"wrote {path}")
    for page in pages(RESULTS.parents[1]):
        text = filled(page, RESULTS)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
