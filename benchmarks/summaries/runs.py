"""Tables of training, of FSDP2 and of launching, each of one or two results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import pairwise

from summaries.cells import MISSING, Results, ratio, select, table, tenths, whole

CONVERGENCE, NVFP4 = "convergence_1b_nvidia_h200", "convergence_125m_after_500_nvidia_h200"
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
_PARTS = 6


def convergence(results: Results) -> str:
    """Percent of training loss above bf16 with the same seed, means of each sixth of the steps."""
    curves = _curves(results, CONVERGENCE)
    others = _compared(curves)
    steps = min(map(len, curves.values()))
    ends = [steps * part // _PARTS for part in range(_PARTS + 1)]
    rows = ([f"{whole(a + 1)}–{whole(b)}", *(_gap(curves, name, a, b) for name in others)] for a, b in pairwise(ends))
    return table(("steps", *others), rows)


def nvfp4_parts(results: Results) -> str:
    """The same at the end, means of the last third of the steps, a column a seed."""
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


def fsdp(results: Results) -> str:
    """Two H200s, eager, then compiled: bytes gathered, time, memory, and what making scales takes."""
    columns = ("recipe", "gathered MiB a step", "of bf16", "ms a step", "× bf16", "× torchao, FP8 gather", "peak GiB")
    columns += ("scales, ms a step", "their all-reduce")
    return table(columns, (cells for name in FSDP for cells in _fsdp_rows(results.rows(name))))


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
    return table(("way", "bf16, ms a step", "FP8", "NVFP4"), (cells(way) for way in WAYS if way in there))
