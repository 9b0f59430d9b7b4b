"""The index of errors: every message that the package raises, found by its text, written as the site is built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import docstrings
import site_pages

PACKAGE = Path(__file__).resolve().parents[2] / "torchao_blockwise"
# What a message is filled in with.
BLANK = "…"
# A shorter text says nothing that could be looked up.
LEAST = 12
ERRORS = (
    "ValueError",
    "TypeError",
    "RuntimeError",
    "ImportError",
    "KeyError",
    "NotImplementedError",
    "FileNotFoundError",
)
# Parts by the folder that the message is in, where its name says little.
AREAS = {
    "_compat": "Versions and other packages",
    "_versions": "Versions and other packages",
    "cli": "Command line",
    "conversion": "Filters and conversion",
    "nn": "Layers (nn)",
    "ops": "Operations (ops)",
    "tensors": "Weights and configs (tensors)",
}


class Message(NamedTuple):
    text: str
    error: str
    place: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """All texts of errors, and of reasons that functions called why_.. give, with a blank for each value."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        place = str(path.relative_to(package.parent))
        for node in ast.walk(tree):
            for kind, text in _texts(node):
                if len(text.replace(BLANK, "").strip()) >= LEAST:
                    found.setdefault(text, Message(text, kind, place))
    return sorted(found.values(), key=lambda message: re.sub(r"\W+", " ", message.text).strip().lower())


def _texts(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what it is, text) of a call of an error, and of each reason that a function gives."""
    if isinstance(node, ast.Call) and _name(node.func) in ERRORS and node.args:
        yield _name(node.func), _text(node.args[0])
    elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("why"):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and inner.value is not None:
                yield "a reason, in errors and warnings", _text(inner.value)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return BLANK if node.value is None else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(rf"{BLANK}+", BLANK, "".join(_text(part) for part in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return next((text for text in map(_text, (node.body, node.orelse)) if text != BLANK), BLANK)
    if isinstance(node, ast.Call):
        # A helper that adds to the text, as `nearest(text, ..)` does.
        return next((text for text in map(_text, node.args) if text != BLANK), BLANK)
    return BLANK


def page() -> str:
    """errors.rst."""
    lines = ["Error index", "===========", ""]
    lines += [f"What the package raises, by part and in the order of the text; {BLANK} stands for a name or a number."]
    lines += [
        "Search it for the words of your error; a message says what was wanted, what was given and what to do.",
        "",
    ]
    by_area: dict[str, list[Message]] = {}
    for message in messages():
        area = message.place.split("/")[1].removesuffix(".py")
        by_area.setdefault(AREAS.get(area, area), []).append(message)
    for area, inside in sorted(by_area.items()):
        lines += [area, "-" * len(area), ""]
        for message in inside:
            lines += [
                docstrings.escape(" ".join(message.text.split())),
                f"    {message.error}, ``{message.place}``",
                "",
            ]
    return "\n".join(lines)


def write(app) -> None:
    site_pages.write(Path(app.srcdir), {"errors.rst": page()})


def setup(app) -> dict:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True}
