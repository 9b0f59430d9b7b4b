"""The index of errors: every message that the package raises, found by its text, written as the site is built."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

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


class Message(NamedTuple):
    text: str
    error: str
    place: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """All messages of `raise Error(text)`, with a blank for each value, by their text."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        place = str(path.relative_to(package.parent))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and _name(node.func) in ERRORS and node.args):
                continue
            text = _text(node.args[0])
            if len(text.replace(BLANK, "").strip()) >= LEAST:
                found.setdefault(text, Message(text, _name(node.func), place))
    return sorted(found.values(), key=lambda message: re.sub(r"\W+", " ", message.text).strip().lower())


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(rf"{BLANK}+", BLANK, "".join(_text(part) for part in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return BLANK


def page() -> str:
    """errors.rst."""
    from docstrings import _escape

    lines = ["Error index", "===========", ""]
    lines += [
        f"What the package raises, in the order of the text. {BLANK} stands for a name or a number. Find yours with",
        "",
    ]
    lines += [
        "the search of this site or of your browser. A message says what was wanted, what was given, and what to do.",
        "",
    ]
    by_area: dict[str, list[Message]] = {}
    for message in messages():
        by_area.setdefault(message.place.split("/")[1].removesuffix(".py"), []).append(message)
    for area, inside in sorted(by_area.items()):
        lines += [area, "-" * len(area), ""]
        for message in inside:
            lines += [_escape(" ".join(message.text.split())), f"    {message.error}, ``{message.place}``", ""]
    return "\n".join(lines)


def write(app) -> None:
    path, text = Path(app.srcdir) / "errors.rst", page()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app) -> dict:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True}
