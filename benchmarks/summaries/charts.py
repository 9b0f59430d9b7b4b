"""Charts of README.md and the pages: speed compared with peers, loss with its noise, memory by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.plot import STYLE, pyplot
from llm_training.study import BASE, chance, gap

from summaries.cells import Results
from summaries.runs import NVFP4, gaps
from summaries.studies import METRIC, STUDIES, config_of

SPEED, MEMORY = "model_4_layers_nvidia_h100_80gb_hbm3", "memory_nvidia_h200"
_OURS, _OTHER, _PEER, _BASE = "#0e7c86", "#b45309", "#9ca3af", "#4b5563"
# Recipe in the results -> label.
_SPEED = {
    "bf16": "bf16",
    "torchao_rowwise": "torchao rowwise",
    "torchao": "torchao blockwise",
    "torchao_tensorwise": "torchao tensorwise",
    "fp8": "FP8, 1x128 blocks",
    "fp8_128x128": "this package, FP8",
    "fp8_128x128_fused_once": "FP8, fuse",
}
_LOSS = {"fp8_128x128": "FP8", "fp8": "FP8, 1x128 blocks", "fp8_power_of_2": "FP8, power-of-2 scales"}
_MEMORY = {
    "bf16": "bf16",
    "fp8": "FP8",
    "fp8, no master weights": "FP8 Parameters",
    "nvfp4": "NVFP4",
    "nvfp4, no master weights": "NVFP4 Parameters",
}
_PARTS = {
    "weights MiB": "weights",
    "gradients MiB": "gradients",
    "held between forward and backward MiB": "saved for backward",
}


# Each draws into the axes and returns a title and what the horizontal axis shows.


def speed(axes: Any, results: Results) -> tuple[str, str]:
    rows = {row["recipe"]: row for row in results.rows(SPEED, mode="compiled", checkpointing="off")}
    values = [rows[recipe]["x bf16"] or 1 for recipe in _SPEED]
    colors = [{"b": _BASE, "t": _PEER, "f": _OURS}[recipe[0]] for recipe in _SPEED]
    axes.bar_label(axes.barh(list(_SPEED.values()), values, color=colors), fmt="%.2f", padding=3)
    axes.margins(x=0.12)
    return "Training step of four Llama-8B layers", "speed relative to bf16; one H100, compiled"


def loss(axes: Any, results: Results) -> tuple[str, str]:
    runs = [results.load(name)["runs"] for name in STUDIES]
    sizes = [config_of(results, name).parameters for name in STUDIES]
    noise = [chance(of, METRIC) for of in runs]
    label = f"{BASE}, one bit changed: ± 1 σ"
    axes.fill_between(sizes, [-x for x in noise], noise, color=_PEER, alpha=0.35, label=label)
    axes.axhline(0, color=_BASE)
    for place, (recipe, label) in enumerate(_LOSS.items()):
        found = [(size, gap(of, recipe, METRIC)) for size, of in zip(sizes, runs)]
        # Side by side, on a logarithmic axis.
        points = [(size * 1.1 ** (place - 1), g.mean, g.half_width) for size, g in found if g]
        at, means, widths = zip(*points)
        color = (_OURS, _OTHER, _BASE)[place]
        axes.errorbar(at, means, yerr=widths, fmt="o", ms=4, color=color, capsize=3, label=label)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e6:.0f} M" for size in sizes])
    axes.minorticks_off()
    axes.margins(x=0.12)
    # Room for the legend.
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.5 * (high - low))
    axes.grid(axis="y")
    axes.legend(loc="upper right", fontsize=7)
    axes.set_ylabel("% of bf16's loss", fontsize=10)
    return "Training loss of FP8 above bf16", "parameters; 95 % intervals"


def loss_nvfp4(axes: Any, results: Results) -> tuple[str, str]:
    found = {label: list(of.values()) for label, of in gaps(results, NVFP4).items()}
    for row, values in enumerate(found.values()):
        axes.plot(values, [row] * len(values), "o", color=_OTHER if row > 1 else (_PEER, _OURS)[row])
    axes.axvline(0, color=_BASE)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    return "Parts of the NVFP4 recipe, 85 M", "% above bf16's loss in the last third; a dot a seed"


def memory(axes: Any, results: Results) -> tuple[str, str]:
    rows = results.load(MEMORY)["rows"]
    left = [0.0] * len(_MEMORY)
    for (part, label), color in zip(_PARTS.items(), (_BASE, _PEER, _OURS)):
        values = [rows[recipe][part] for recipe in _MEMORY]
        axes.barh(list(_MEMORY.values()), values, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, values)]
    axes.invert_yaxis()
    axes.margins(x=0.8)
    axes.legend(loc="lower right", fontsize=8)
    return "Memory of four bf16 MLPs, 8,192 tokens", "MiB; not all parts are allocated at the same time"


CHARTS = {
    "chart_speed": speed,
    "chart_loss": loss,
    "chart_loss_nvfp4": loss_nvfp4,
    "chart_memory": memory,
}


def draw(results: Results, folder: Path) -> list[Path]:
    plt = pyplot()
    if plt is None:
        return []
    paths = []
    for name, chart in CHARTS.items():
        # Narrow, so that text stays readable on a phone.
        with plt.rc_context(STYLE | {"font.size": 11, "axes.grid.axis": "x"}):
            figure, axes = plt.subplots(figsize=(4.2, 2.8), layout="constrained")
            title, what = chart(axes, results)
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
            figure.supxlabel(what, fontsize=10)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=160, facecolor="white", metadata={"Software": None})
            plt.close(figure)
    return paths
