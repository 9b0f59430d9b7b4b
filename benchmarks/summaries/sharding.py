"""FSDP2 on two H200s: bytes gathered, time, memory, and what making scales takes."""

from __future__ import annotations

from collections.abc import Iterable

from summaries.cells import MISSING, Results, ratio, select, table, tenths, whole

NAMES = ("fsdp_nvidia_h200", "fsdp_compiled_nvidia_h200")
RECIPES = {
    "bf16": "bf16",
    "torchao_bf16_gather": "torchao, bf16 gather",
    "torchao_fp8_gather": "torchao, FP8 gather",
    "fp8": "FP8",
    "nvfp4": "NVFP4",
}
COLUMNS = ("recipe", "gathered MiB a step", "of bf16", "ms a step", "× bf16", "× torchao, FP8 gather", "peak GiB")
SYNC = ("scales, ms a step", "their all-reduce")


def fsdp(results: Results) -> str:
    """Eager, then compiled."""
    return table((*COLUMNS, *SYNC), (row for name in NAMES for row in _rows(results.rows(name))))


def _rows(rows: list[dict]) -> Iterable[list[str]]:
    (torchao,) = select(rows, recipe="torchao_fp8_gather")
    for row in rows:
        times = (row["x bf16"], row["tokens/s"] / torchao["tokens/s"])
        scales = [MISSING if row[key] is None else f"{row[key]:.2f}" for key in ("sync ms", "reduce ms")]
        moved = (whole(row["gathered MiB"]), f"{row['of bf16']:.3f}", tenths(row["ms a step"]))
        yield [f"{RECIPES[row['recipe']]}, {row['mode']}", *moved, *map(ratio, times), tenths(row["peak GiB"]), *scales]
