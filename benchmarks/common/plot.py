"""The picture of training runs: loss curves above, their distance to bf16 below."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FAINT = "#6b7280"
STYLE = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Mean over the `span` steps around each; near the start fewer, on both sides alike, so that it does not lag."""
    out = []
    for i in range(len(values)):
        left = min(span // 2, i)
        window = values[i - left : i + left + 1]
        out.append(sum(window) / len(window))
    return out


def distance(losses: Sequence[float], base: Sequence[float]) -> list[float]:
    """Percent that smoothed `losses` are above smoothed `base`, step by step."""
    span = max(3, len(base) // 20)
    return [100 * (x / y - 1) for x, y in zip(smooth(losses, span), smooth(base, span))]


def pyplot() -> Any:
    """matplotlib.pyplot without a display; None where matplotlib is missing, which is printed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    return plt


def draw(
    path: Path,
    title: str,
    subtitle: str,
    losses: Mapping[str, Sequence[float]],
    distances: Mapping[str, Sequence[float]],
    tokens_a_step: int,
    level: float,
) -> None:
    """Write the picture; none where matplotlib is missing, which is printed.

    losses: training losses by label, of which the first is bf16's. distances: as of `distance`, in the same order,
    empty without bf16. level: entropy of a byte, the loss of a model that knows only frequencies.
    """
    plt = pyplot()
    if plt is None:
        return
    with plt.rc_context(STYLE):
        rows = 2 if distances else 1
        figure, axes = plt.subplots(
            rows, 1, figsize=(9, 6.2 if distances else 4.8), sharex=True, squeeze=False,
            height_ratios=[2.6, 1][:rows], layout="constrained",
        )  # fmt: skip
        top, bottom = axes[0, 0], axes[-1, 0]
        for label, curve in losses.items():
            span = max(3, len(curve) // 20)
            (line,) = top.plot(_tokens(curve, tokens_a_step), smooth(curve, span), label=label)
            top.plot(_tokens(curve, tokens_a_step), curve, color=line.get_color(), alpha=0.18, linewidth=0.8)
        finite = [x for curve in losses.values() for x in curve if math.isfinite(x)]
        top.set_ylim(min(finite) - 0.1, max(1.12 * level, min(finite) + 0.5))
        top.axhline(level, color=_FAINT, linestyle=":", label="byte frequencies")
        top.set_ylabel("training loss (nats per byte)")
        for i, (label, curve) in enumerate(distances.items(), 1):
            bottom.plot(_tokens(curve, tokens_a_step), curve, color=f"C{i}", label=label)
        if distances:
            bottom.axhline(0, color=_FAINT)
            bottom.set_ylabel("above bf16, % (smoothed)")
        top.legend(frameon=False)
        bottom.set_xlabel("training tokens (bytes)")
        figure.suptitle(title, x=0.015, ha="left", fontsize=14, fontweight="bold")
        top.set_title(subtitle, loc="left", fontsize=10, color=_FAINT)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _tokens(curve: Sequence, tokens_a_step: int) -> list[int]:
    return [(i + 1) * tokens_a_step for i in range(len(curve))]
