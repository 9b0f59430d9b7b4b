"""Tables of training, of FSDP2 and of launching, each of one or two results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from common.report import MISSING, markdown

from summaries.cells import Results, ratio, select, tenths, whole

NVFP4 = "convergence_125m_after_500_nvidia_h200"
FSDP = ("fsdp_nvidia_h200", "fsdp_compiled_nvidia_h200")
GRAPHS = "graphs_nvidia_h100_80gb_hbm3"
RECIPES = {
    "bf16": "bf16",
    "torchao_bf16_gather": "torchao, bf16 gather",
    "torchao_fp8_gather": "torchao, FP8 gather",
    "fp8": "FP8",
    "nvfp4": "NVFP4",
}
WAYS = {
    "eager": "eager",
    "compiled": "compiled, layer by layer",
    "reduce_overhead": "`reduce-overhead`",
    "graphed_callable": "`make_graphed_callables`",
    "forward_backward": "forward and backward in a graph",
    "whole_step": "the whole step in a graph",
}
# Recipe in the results -> label.
LABELS = {
    "bf16_perturbed": "bf16, one bit changed",
    "fp8": "FP8",
    "nvfp4": "NVFP4, to nearest",
    "nvfp4_hadamard": "+ Hadamard transform",
    "nvfp4_stochastic": "+ stochastic rounding",
    "nvfp4_full": "NVFP4",
    "nvfp4_full_15_percent": "NVFP4, 15 % in bf16",
}


def nvfp4_parts(results: Results) -> str:
    """Percent of training loss above bf16 with parts of the recipe of NVFP4, a column a seed."""
    recipes = gaps(results, NVFP4)
    seeds = sorted({seed for by_seed in recipes.values() for seed in by_seed})
    rows = [
        [label, *(f"{found[seed]:+.2f} %" if seed in found else MISSING for seed in seeds)]
        for label, found in recipes.items()
    ]
    return markdown(("recipe", *seeds), rows)


def gaps(results: Results, name: str) -> dict[str, dict[str, float]]:
    """{label: {seed: percent that its training loss is above that of bf16 with the same seed}}, of the last third."""
    levels: dict[tuple[str, str], float] = {}
    for run, written in results.load(name)["runs"].items():
        recipe, seed = run.split(", ")
        levels[recipe, seed] = statistics.fmean(written["loss"][-(len(written["loss"]) // 3) :])
    out: dict[str, dict[str, float]] = {}
    for (recipe, seed), level in levels.items():
        if recipe in LABELS and ("bf16", seed) in levels:
            out.setdefault(LABELS[recipe], {})[seed] = 100 * (level / levels["bf16", seed] - 1)
    return out


def fsdp(results: Results) -> str:
    """Two H200s, eager, then compiled: bytes gathered, time, memory, and what making scales takes."""
    columns = ("recipe", "gathered MiB per step", "of bf16", "ms per step", "× bf16", "× torchao, FP8 gather")
    columns += ("peak GiB", "scales, ms per step", "their all-reduce")
    return markdown(columns, (cells for name in FSDP for cells in _fsdp_rows(results.rows(name))))


def _fsdp_rows(rows: list[dict]) -> Iterable[list[str]]:
    (torchao,) = select(rows, recipe="torchao_fp8_gather")
    for row in rows:
        faster = (row["x bf16"], row["tokens/s"] / torchao["tokens/s"])
        scales = [MISSING if row[key] is None else f"{row[key]:.2f}" for key in ("sync ms", "reduce ms")]
        moved = (whole(row["gathered MiB"]), f"{row['of bf16']:.3f}", tenths(row["ms a step"]))
        yield [
            f"{RECIPES[row['recipe']]}, {row['mode']}",
            *moved,
            *map(ratio, faster),
            tenths(row["peak GiB"]),
            *scales,
        ]


def graphs(results: Results) -> str:
    """A small model on an H100: milliseconds a step, and bf16's over them."""
    rows = results.rows(GRAPHS)

    def cells(way: str) -> list[str]:
        bf16, *others = (select(rows, way=way, recipe=recipe)[0] for recipe in ("bf16", "fp8", "nvfp4"))
        shown = [f"{tenths(row['ms a step'])} ({ratio(row['x bf16'])} ×)" for row in others]
        return [WAYS[way], tenths(bf16["ms a step"]), *shown]

    there = {row["way"] for row in rows}
    return markdown(("method", "bf16, ms per step", "FP8", "NVFP4"), (cells(way) for way in WAYS if way in there))
