"""The picture: loss curves above, their gap to bf16 below."""

from __future__ import annotations

import math
from pathlib import Path

from picture import FAINT, STYLE, entitle, plt, save

from llm.config import RunConfig
from llm.report import gap
from llm.training import Result

_COLORS = {"bf16": "#22262b", "fp8": "#2563eb", "nvfp4": "#e8710a"}


def write_plot(
    path: Path, config: RunConfig, results: list[Result], *, title: str, data: str, unigram_entropy: float
) -> None:
    """Draw training loss over tokens, smoothed over the raw values, and below it each gap to bf16 in %."""
    with plt.rc_context(STYLE):
        base = next((r for r in results if r.recipe == "bf16"), None)
        gaps = [r for r in results if base is not None and r is not base]
        figure, axes = plt.subplots(
            2 if gaps else 1, 1, figsize=(9, 6.2 if gaps else 4.8), sharex=True, squeeze=False,
            height_ratios=[2.6, 1] if gaps else None, layout="constrained",
        )  # fmt: skip
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, hspace=0.04)
        top, bottom = axes[0, 0], axes[-1, 0]
        span = max(3, config.steps // 20)
        _draw_losses(top, config, results, span, unigram_entropy)
        if gaps:
            _draw_gaps(bottom, config, base, gaps, span)
        bottom.xaxis.set_major_formatter(lambda x, _: tokens_text(x) if x else "0")
        figure.align_ylabels()
        bottom.set_xlabel("training tokens (bytes)")
        entitle(figure, top, title, data)
        save(figure, path)


def tokens_text(count: float) -> str:
    """131072 -> '131 k', 32768000 -> '32.8 M'."""
    return f"{count / 1e6:.3g} M" if count >= 999_500 else f"{count / 1e3:.3g} k"


def color_of(recipe: str) -> str:
    """That of its precision."""
    return _COLORS[recipe.split("_")[0]]


def name_of(recipe: str) -> str:
    """fp8_fused -> FP8 fused."""
    precision, *rest = recipe.split("_")
    return " ".join((precision.upper(), *rest))


def smooth(values: list[float], span: int) -> list[float]:
    """Mean over the `span` steps around each; near the start fewer, on both sides alike, so that it does not lag."""
    out = []
    for i in range(len(values)):
        left = min(span // 2, i)
        window = values[i - left : i + left + 1]
        out.append(sum(window) / len(window))
    return out


def spread(positions: list[float], distance: float) -> list[float]:
    """Move positions apart until neighbors are `distance` apart, keeping their order and their middle."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed: list[float] = []
    for i in order:
        placed.append(max(positions[i], placed[-1] + distance) if placed else positions[i])
    shift = sum(positions) / len(positions) - sum(placed) / len(placed)
    result = [0.0] * len(positions)
    for i, value in zip(order, placed):
        result[i] = value + shift
    return result


def _draw_losses(ax, config: RunConfig, results: list[Result], span: int, unigram_entropy: float) -> None:
    ends, labels = [], []
    for r in results:
        tokens = _tokens(config, len(r.losses))
        curve = smooth(r.losses, span)
        ax.plot(tokens, r.losses, color=color_of(r.recipe), alpha=0.18, linewidth=0.8)
        ax.plot(tokens, curve, color=color_of(r.recipe), linewidth=1.9)
        ends.append(_last_finite(curve, unigram_entropy))
        labels.append(f"{name_of(r.recipe)}  {_held_out(r, results)}")
    lowest = min(loss for r in results for loss in r.losses if math.isfinite(loss))
    highest = max(unigram_entropy * 1.12, lowest + 0.5)
    ax.set_ylim(lowest - 0.04 * (highest - lowest), highest)
    total = config.steps * config.tokens_per_step
    ax.set_xlim(0, total)
    ax.axhline(unigram_entropy, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    ax.annotate("byte frequencies alone", (total, unigram_entropy), (-4, 4), textcoords="offset points", ha="right",
                fontsize=9, color=FAINT)  # fmt: skip
    _label_ends(ax, results, ends, labels, "held-out loss")
    ax.set_ylabel("training loss (nats a byte)")


def _draw_gaps(ax, config: RunConfig, base: Result, gaps: list[Result], span: int) -> None:
    reference = smooth(base.losses, span)
    ends, settled = [], []
    for r in gaps:
        curve = [100 * (x / y - 1) for x, y in zip(smooth(r.losses, span), reference)]
        ax.plot(_tokens(config, len(curve)), curve, color=color_of(r.recipe), linewidth=1.7)
        ends.append(_last_finite(curve, 0.0))
        settled += [x for x in curve if math.isfinite(x)]
    ax.axhline(0, color=_COLORS["bf16"], linewidth=1.2)
    reach = max(0.5, 1.15 * max(map(abs, settled), default=0.0))
    low, high = min(settled, default=0.0), max(settled, default=0.0)
    ax.set_ylim(min(-0.25 * reach, 1.15 * low), reach if high > 0 else 0.25 * reach)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:+g} %" if y else "0")
    ax.set_ylabel("gap to BF16\n(smoothed)")
    _label_ends(ax, gaps, ends, [name_of(r.recipe) for r in gaps])


def _label_ends(ax, results: list[Result], ends: list[float], labels: list[str], heading: str | None = None) -> None:
    """Name each line at its right end, moved apart where they would overlap."""
    low, high = ax.get_ylim()
    height = ax.get_position().height * ax.figure.get_figheight() * 72
    line = 15 * (high - low) / height
    places = spread([min(max(end, low), high) for end in ends], line)
    style = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "va": "center",
        "annotation_clip": False,
    }
    for r, place, label in zip(results, places, labels):
        ax.annotate(label, (1, place), (8, 0), color=color_of(r.recipe), fontweight="bold", **style)
    if heading:
        ax.annotate(heading, (1, max(places) + line), (8, 0), color=FAINT, fontsize=9, **style)


def _held_out(result: Result, results: list[Result]) -> str:
    """The held-out loss and, where there is one, its gap to bf16: the numbers of the table."""
    if result.diverged:
        return "diverged"
    percent = gap(result, results)
    shown = result.recipe != "bf16" and math.isfinite(percent)
    return f"{result.held_out_loss:.3f}" + (f" ({percent:+.2f} %)" if shown else "")


def _last_finite(curve: list[float], otherwise: float) -> float:
    return next((x for x in reversed(curve) if math.isfinite(x)), otherwise)


def _tokens(config: RunConfig, steps: int) -> list[int]:
    return [(i + 1) * config.tokens_per_step for i in range(steps)]
