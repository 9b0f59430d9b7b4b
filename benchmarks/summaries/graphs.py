"""A small model's step on an H100, eager, compiled and in CUDA graphs."""

from __future__ import annotations

from summaries.cells import Results, ratio, select, table, tenths

NAME = "graphs_nvidia_h100_80gb_hbm3"
WAYS = {
    "eager": "eager",
    "compiled": "compiled, layer by layer",
    "reduce_overhead": "`reduce-overhead`",
    "graphed_callable": "`make_graphed_callables`",
    "forward_backward": "forward and backward in a graph",
    "whole_step": "the whole step in a graph",
}


def ways(results: Results) -> str:
    """Milliseconds a step, and bf16's over them."""
    rows = results.rows(NAME)

    def cells(way: str) -> list[str]:
        bf16, *others = (select(rows, way=way, recipe=recipe)[0] for recipe in ("bf16", "fp8", "nvfp4"))
        beside = [f"{tenths(row['ms a step'])} ({ratio(row['x bf16'])} ×)" for row in others]
        return [WAYS[way], tenths(bf16["ms a step"]), *beside]

    there = {row["way"] for row in rows}
    return table(("way", "bf16, ms a step", "FP8", "NVFP4"), (cells(way) for way in WAYS if way in there))
