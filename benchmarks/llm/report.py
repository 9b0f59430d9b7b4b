"""What a run leaves behind: a table, a JSON with everything, and a picture of the curves."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import environment
import torch

from llm.config import RunConfig
from llm.data import Corpus
from llm.training import Result

HEADER = ("recipe", "held-out loss", "gap to bf16", "train loss", "tokens/s", "weights", "activations", "peak memory")


def gap(result: Result, results: list[Result]) -> float:
    """Held-out loss above that of bf16, in %; NaN where one of them is missing."""
    base = next((r.held_out_loss for r in results if r.recipe == "bf16"), math.nan)
    return 100 * (result.held_out_loss / base - 1)


def rows(results: list[Result]) -> list[dict]:
    """The table as data, a dict a recipe; None where there is no value."""
    return [
        {
            "recipe": r.recipe,
            "layers": r.layers,
            "held_out_loss": _finite(r.held_out_loss),
            "evaluated_in": {name: _finite(loss) for name, loss in r.evaluated_in.items()},
            "gap_percent": _finite(gap(r, results)),
            "train_loss": _finite(r.train_loss),
            "tokens_per_second": r.tokens_per_second,
            "weight_bytes": r.weight_bytes,
            "activation_bytes": r.activation_bytes,
            "peak_bytes": r.peak_bytes,
        }
        for r in results
    ]


def table(results: list[Result]) -> str:
    """The results as an aligned Markdown table."""
    cells = [HEADER]
    for r, row in zip(results, rows(results)):
        percent = "-" if r.recipe == "bf16" or row["gap_percent"] is None else f"{row['gap_percent']:+.2f} %"
        loss = f"diverged at step {len(r.losses)}" if r.diverged else f"{r.held_out_loss:.4f}"
        train_loss = "-" if r.diverged else f"{r.train_loss:.4f}"
        sizes = (_bytes(row[k]) for k in ("weight_bytes", "activation_bytes", "peak_bytes"))
        cells.append((r.recipe, loss, percent, train_loss, f"{r.tokens_per_second:,.0f}", *sizes))
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths))
    lines = []
    for cell in cells:
        first, *rest = (f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cell, widths)))
        lines.append(f"| {' | '.join((first, *rest))} |")
    return "\n".join((lines[0], f"|{rule}|", *lines[1:]))


def footnotes(config: RunConfig, corpus: Corpus, device: torch.device) -> str:
    """What the table's numbers are and where they come from, for the reader of the terminal."""
    tokens = config.steps * config.tokens_per_step
    read = f"{tokens:,} tokens from {len(corpus.train) / 1e6:,.1f} MB of text ({corpus.name})"
    passes = corpus.passes(tokens)
    repeated = f"each byte {passes:.1f} times" if passes > 1 else "no byte twice"
    notes = [
        f"{environment.device_name(device)}. {read}, {repeated}.",
        "held-out loss: nats a byte, each model in its own precision. train loss: mean of the last steps (5 %, or 10).",
        "weights: those of linear layers and experts as the GEMMs read them; every recipe keeps fp32 masters besides.",
        "activations: saved for backward by one microbatch, run eagerly.",
    ]
    if device.type == "cpu":
        notes.append("On a CPU low precision is emulated: tokens/s and memory say nothing of a GPU, the losses do.")
    if config.products == "fp32":
        notes.append("This processor is slow in bf16: bf16 products are computed in fp32 on the same operands.")
    return "\n".join(notes)


def write_json(path: Path, config: RunConfig, corpus: Corpus, device: torch.device, results: list[Result]) -> None:
    """Everything about the run: configuration, data, environment, table and curves."""
    curves = {r.recipe: {"loss": [_finite(x) for x in r.losses], "seconds": r.seconds} for r in results}
    content = {
        "config": asdict(config) | {"parameters": config.parameters},
        "data": {
            "name": corpus.name,
            "sha256_16": corpus.digest,
            "train_bytes": len(corpus.train),
            "passes": corpus.passes(config.steps * config.tokens_per_step),
            "held_out_sequences": len(corpus.held_out),
            "unigram_entropy": corpus.unigram_entropy,
        },
        "environment": environment.environment(device),
        "table": rows(results),
        "curves": curves,
    }
    environment.write_json(path, content)


def write_table(path: Path, config: RunConfig, corpus: Corpus, device: torch.device, results: list[Result]) -> None:
    """The table and its footnotes as Markdown."""
    environment.write_text(path, f"{table(results)}\n\n{footnotes(config, corpus, device)}\n")


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
