"""Writers of reports: CSV files, an HTML page, and loggers of the program (Weights & Biases, TensorBoard).

The page is made from page/: page.html, style.css, and script.js, which draws the embedded data.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from torchao_blockwise.diagnostics.records import KINDS, Report, TensorReport, recommend

_PAGE = Path(__file__).parent / "page"
# The number of reports that curves show; when there are more, every other one is dropped.
_MOST_REPORTS = 256


class Writer(Protocol):
    """Receives reports."""

    def write(self, report: Report) -> None: ...

    def close(self) -> None: ...


def checked_writers(writers: Iterable[Any]) -> list[Any]:
    """Return `writers` as a list; raises TypeError for an object that takes no reports."""
    checked = list(writers)
    for writer in checked:
        if not any(hasattr(writer, name) for name in ("write", "add_scalar", "log")):
            raise TypeError(
                "NumericsMonitor: writers must hold objects with write(report), W&B runs, or TensorBoard "
                f"SummaryWriters, got {writer!r}; for a file, use HTMLWriter(path) or CSVWriter(path)"
            )
    return checked


def write_to(writer: Any, report: Report) -> None:
    """Write a report to a `Writer`, or its scalars to TensorBoard's `add_scalar` or to `log` of Weights & Biases."""
    if hasattr(writer, "write"):
        writer.write(report)
    elif hasattr(writer, "add_scalar"):
        for tag, value in scalars(report):
            writer.add_scalar(tag, value, report.step)
        writer.flush()
    else:
        # A separate step metric: W&B refuses steps that are not larger than the last one, and the program logs too.
        writer.log({"numerics/step": report.step, **dict(scalars(report))})


def close_writer(writer: Any) -> None:
    """Close a `Writer`; loggers stay open, because the program uses them too."""
    if hasattr(writer, "write"):
        writer.close()


def _writable(path: str | os.PathLike[str]) -> Path:
    """Return `path` after creating its folder; raises OSError now rather than after a training step."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.open("a", encoding="utf-8").close()
    return file


class CSVWriter:
    """Append a row for each tensor of each report to a CSV file.

    Columns are the fields of `TensorReport` and `gradient_to_noise` of the layer; `histogram` is "e:blocks ...".
    Raises OSError if the file cannot be written.
    """

    columns = ("step", *(field.name for field in fields(TensorReport)), "gradient_to_noise")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _writable(path)

    def write(self, report: Report) -> None:
        noise = {(g.layer, g.recipe): g.to_noise for g in report.gradients}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            if not file.tell():
                rows.writerow(self.columns)
            for tensor in report.tensors:
                values = [_cell(getattr(tensor, field.name)) for field in fields(TensorReport)]
                rows.writerow([report.step, *values, noise.get((tensor.layer, tensor.recipe), math.nan)])

    def close(self) -> None: ...


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{e}:{blocks}" for e, blocks in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def scalars(report: Report) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for the recipes that train, and the lowest SQNR of each layer for each other recipe.

    "numerics/gradient_to_noise", "sqnr_db/layers.0.up/dy rowwise", "what_if/nvfp4/layers.0.up", ..
    """
    yield "numerics/gradient_to_noise", report.gradient_to_noise
    yield "numerics/nonfinite", float(sum(t.nonfinite for t in report.tensors if t.trains))
    for tensor in report.tensors:
        if tensor.trains:
            where = f"{tensor.layer}/{tensor.kind}"
            for name in ("sqnr_db", "cosine", "amax", "underflow", "saturated"):
                yield f"{name}/{where}", getattr(tensor, name)
    for gradient in report.gradients:
        if gradient.layer and gradient.trains:
            yield f"gradient_to_noise/{gradient.layer}", gradient.to_noise
    for recipe in dict.fromkeys(t.recipe for t in report.tensors if not t.trains):
        for layer, sqnr in report.what_if(recipe).items():
            yield f"what_if/{recipe}/{layer}", sqnr


class HTMLWriter:
    """Write an HTML page with recommendations, curves over steps, a table of layers, and the error of other recipes.

    Curves show the reports since this writer was created, thinned out if there are many. The rest shows the last
    report. The page needs no network. Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _writable(path)
        self._history: list[dict[str, Any]] = []

    def write(self, report: Report) -> None:
        if len(self._history) == _MOST_REPORTS:
            del self._history[1::2]
        self._history.append(_in_short(report))
        page = (_PAGE / "page.html").read_text(encoding="utf-8")
        # The NaN and Infinity that `json` writes are valid JavaScript.
        data = json.dumps(_page_data(report, self._history), ensure_ascii=False, separators=(",", ":"))
        parts = {
            "/*STYLE*/": (_PAGE / "style.css").read_text(encoding="utf-8"),
            "/*SCRIPT*/": (_PAGE / "script.js").read_text(encoding="utf-8"),
            # Escaped, so that no name of a layer can close the <script> element.
            "/*DATA*/": data.replace("<", "\\u003c"),
        }
        for mark, text in parts.items():
            page = page.replace(mark, text)
        # Replaced atomically, in case the page is reloaded meanwhile.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(page, encoding="utf-8")
        os.replace(new, self.path)

    def close(self) -> None: ...


def _in_short(report: Report) -> dict[str, Any]:
    """Return the values that curves show; the recipe "" stands for the recipes that the layers train with."""
    sqnr: dict[str, dict[str, dict[str, float]]] = {}
    for tensor in report.tensors:
        sqnr.setdefault(tensor.layer, {}).setdefault(tensor.recipe, {})[tensor.kind] = round(tensor.sqnr_db, 3)
    ratio = {("" if g.trains else g.recipe): g.to_noise for g in report.gradients if not g.layer}
    return {"step": report.step, "ratio": ratio, "sqnr": sqnr}


def _page_data(report: Report, history: list[dict[str, Any]]) -> dict[str, Any]:
    noise = {(g.layer, g.recipe): g.to_noise for g in report.gradients}
    rows = [
        {**asdict(tensor), "kind": tensor.kind, "to_noise": noise.get((tensor.layer, tensor.recipe))}
        for tensor in report.tensors
    ]
    return {
        "reports": history,
        "last": rows,
        "kinds": KINDS,
        "layers": list(dict.fromkeys(tensor.layer for tensor in report.tensors)),
        "recipes": list(dict.fromkeys(tensor.recipe for tensor in report.tensors)),
        "trained": {tensor.layer: tensor.recipe for tensor in report.tensors if tensor.trains},
        "recommended": [asdict(recommendation) for recommendation in recommend(report)],
        "first_nonfinite": report.first_nonfinite,
    }
