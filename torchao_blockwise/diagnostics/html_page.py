"""The HTML report: one file that needs no network, written anew with each report.

The page is in page/: page.html, style.css, and script.js, which draws from the data that is put beside it.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchao_blockwise.diagnostics.records import KINDS, Report, recommend
from torchao_blockwise.diagnostics.writers import writable_file

_PAGE = Path(__file__).parent / "page"
# Reports that curves show; when there are more, every other one is left out.
_MOST_REPORTS = 256


class HTMLWriter:
    """A page with what to look at first, curves over steps, a table of layers, and what other recipes would lose.

    Curves show reports since this writer was made, of many every other one; all else is of the last report.
    Raises ValueError where the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = writable_file("HTMLWriter", path)
        self._history: list[dict[str, Any]] = []

    def write(self, report: Report) -> None:
        if len(self._history) == _MOST_REPORTS:
            del self._history[1::2]
        self._history.append(_in_short(report))
        page = (_PAGE / "page.html").read_text(encoding="utf-8")
        data = json.dumps(_plain(_page_data(report, self._history)), ensure_ascii=False, separators=(",", ":"))
        parts = {
            "/*STYLE*/": (_PAGE / "style.css").read_text(encoding="utf-8"),
            "/*SCRIPT*/": (_PAGE / "script.js").read_text(encoding="utf-8"),
            # No name of a layer ends the element that the data is in.
            "/*DATA*/": data.replace("<", "\\u003c"),
        }
        for mark, text in parts.items():
            page = page.replace(mark, text)
        # Whoever reloads the page meanwhile sees the old one or the new one.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(page, encoding="utf-8")
        os.replace(new, self.path)

    def close(self) -> None: ...


def _in_short(report: Report) -> dict[str, Any]:
    """What curves over steps show; the ratio of what trains is that of the recipe ""."""
    sqnr: dict[str, dict[str, dict[str, float]]] = {}
    for tensor in report.tensors:
        sqnr.setdefault(tensor.layer, {}).setdefault(tensor.recipe, {})[str(tensor.kind)] = round(tensor.sqnr_db, 3)
    ratio = {("" if g.trains else g.recipe): g.to_noise for g in report.gradients if not g.layer}
    return {"step": report.step, "ratio": ratio, "sqnr": sqnr}


def _page_data(report: Report, history: list[dict[str, Any]]) -> dict[str, Any]:
    noise = {(g.layer, g.recipe): g.to_noise for g in report.gradients}
    rows = [
        {**asdict(tensor), "kind": str(tensor.kind), "to_noise": noise.get((tensor.layer, tensor.recipe))}
        for tensor in report.tensors
    ]
    return {
        "reports": history,
        "last": rows,
        "kinds": [str(kind) for kind in KINDS],
        "layers": list(dict.fromkeys(tensor.layer for tensor in report.tensors)),
        "recipes": list(dict.fromkeys(tensor.recipe for tensor in report.tensors)),
        "trained": {tensor.layer: tensor.recipe for tensor in report.tensors if tensor.trains},
        "recommended": [asdict(recommendation) for recommendation in recommend(report)],
        "first_nonfinite": report.first_nonfinite,
    }


def _plain(value: Any) -> Any:
    """`value` with what JSON has no number for as strings that JavaScript's Number reads."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
