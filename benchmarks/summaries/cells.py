"""Rows of the results, and the cells that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common.report import MISSING


class Results:
    """The results of a folder, <name>.json each."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def rows(self, name: str, **where: object) -> list[dict]:
        content = self.load(name)
        # A study has runs.
        return select(content["runs"] if "runs" in content else content["rows"], **where)


def select(rows: Iterable[Mapping], **where: object) -> list[dict]:
    """The rows that have these values, or one of them where a tuple is given."""

    def fits(row: Mapping) -> bool:
        return all(row.get(key) in (value if isinstance(value, tuple) else (value,)) for key, value in where.items())

    return [dict(row) for row in rows if fits(row)]


def column(rows: Iterable[Mapping], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def against(rows: Iterable[Mapping], others: Iterable[Mapping], name: str, same: Sequence[str]) -> list[float]:
    """`name` of each row over that of the other row with the same values in the columns `same`, where there is one."""
    there = {tuple(row[key] for key in same): row[name] for row in others if row.get(name)}
    pairs = [(row.get(name), there.get(tuple(row[key] for key in same))) for row in rows]
    return [value / other for value, other in pairs if value is not None and other is not None]


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def tenths(value: float) -> str:
    return f"{value:,.1f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def span(values: Iterable[float], text: Callable[[float], str] = ratio) -> str:
    """The least and the greatest, or one where both read the same; MISSING where there is none."""
    found = list(values)
    return "–".join(dict.fromkeys((text(min(found)), text(max(found))))) if found else MISSING


def times(shape: str) -> str:
    return shape.replace("x", "×")


def sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split("x")]


def link(text: str, name: str) -> str:
    return f"[{text}]({name}.md)"
