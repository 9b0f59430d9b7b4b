"""The index of errors: every error and warning of the package, found by its text, written as the site is built."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import docstrings
import site_pages

PACKAGE = Path(__file__).resolve().parents[2] / "torchao_blockwise"
# Placeholders of messages.
BLANK = "…"
# A shorter text says nothing that could be looked up.
LEAST = 12
REASON = "a reason, in errors and warnings"
# Parts by the folder that the message is in.
AREAS = {
    "_compat": "Versions and other packages",
    "_versions": "Versions and other packages",
    "checkpoint": "Files of weights (checkpoint)",
    "cli": "Command line",
    "conversion": "Filters and conversion",
    "diagnostics": "Monitor and reports (diagnostics)",
    "distributed": "Ranks (distributed)",
    "formats": "Formats",
    "integrations": "Frameworks (integrations)",
    "nn": "Layers (nn)",
    "ops": "Operations (ops)",
    "tensors": "Weights and configs (tensors)",
    "testing": "Helpers of tests",
}


class Message(NamedTuple):
    text: str
    error: str
    place: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """All texts of errors and warnings, and of the reasons in them, with a blank for each value."""
    found = {}
    trees = _trees(package)
    helpers = _helpers(trees.values())
    for path, tree in trees.items():
        place = str(path.relative_to(package.parent))
        for node in ast.walk(tree):
            for kind, text in _texts(node, helpers):
                if says_something(text):
                    found.setdefault(text, Message(text, kind, place))
    return sorted(found.values(), key=lambda message: re.sub(r"\W+", " ", message.text).strip().lower())


def says_something(text: str) -> bool:
    return len(text.replace(BLANK, "").strip()) >= LEAST


def unfound(package: Path = PACKAGE) -> list[str]:
    """Where an error is raised whose text `messages` does not have: "file.py:line".

    A text that is too short to be listed contains the text of another error, or a reason: the result of a function
    called why_.. or of the function that the error calls.
    """
    trees = _trees(package)
    known = {message.text for message in messages(package)}
    helpers = _helpers(trees.values())
    missing = []
    for path, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            reasons = _reasons(function, helpers)
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and (error := _error(node)) is not None:
                    first = error.args[0]
                    named = {part.id for part in ast.walk(first) if isinstance(part, ast.Name)}
                    if _text(first) not in known and not named & (reasons | helpers):
                        missing.append(f"{path.relative_to(package.parent)}:{node.lineno}")
    return list(dict.fromkeys(missing))


def _trees(package: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}


def _helpers(trees: Iterable[ast.Module]) -> set[str]:
    """Functions of the package that give an error its whole text, and those that are called why_..."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    made_of = [error.args[0] for node in nodes if (error := _error(node)) is not None]
    called = {_name(text.func) for text in made_of if isinstance(text, ast.Call)}
    return {name for name in defined if name in called or name.lstrip("_").startswith("why")}


def _reasons(function: ast.FunctionDef, helpers: set[str]) -> set[str]:
    """Variables that hold what a helper gave, or an error that was caught; with those made of them."""
    found: set[str] = set()
    # Twice: a part of a variable is taken after the variable.
    for node in [*ast.walk(function), *ast.walk(function)]:
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.NamedExpr)):
            made_of = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            made_of |= {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
            if made_of & (helpers | found):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def _texts(node: ast.AST, helpers: set[str]) -> Iterator[tuple[str, str]]:
    """(what it is, text) of an error, of a warning, and of each reason that a function gives."""
    if (error := _error(node)) is not None:
        yield _name(error.func), _text(error.args[0])
    elif isinstance(node, ast.Call) and _name(node.func) == "warn" and node.args:
        yield "a warning", _text(node.args[0])
    elif isinstance(node, ast.FunctionDef) and node.name in helpers:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and inner.value is not None:
                # With or without the class of the error.
                parts = inner.value.elts if isinstance(inner.value, ast.Tuple) else [inner.value]
                yield from ((REASON, _text(part)) for part in parts)


def _error(node: ast.AST) -> ast.Call | None:
    """Calls that create an error with a text: where it is raised, or of a class with such a name."""
    made = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(made, ast.Call) or not made.args:
        return None
    return made if isinstance(node, ast.Raise) or _name(made.func).endswith("Error") else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


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
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return re.sub(r"\{\w*\}", BLANK, _text(node.func.value))
        # A helper that adds to the text, as `nearest(text, ..)` does.
        return next((text for text in map(_text, node.args) if text != BLANK), BLANK)
    return BLANK


def page() -> str:
    """errors.rst."""
    lines = ["Error index", "===========", ""]
    lines += [
        "This page lists all errors and warnings of the package by part, in alphabetical order.",
        f"Search it for the words of your message. {BLANK} stands for a name or a number.",
        "A message states what was expected, what was given and what to do.",
        "",
    ]
    by_area: dict[str, list[tuple[int, Message]]] = {}
    for number, message in enumerate(messages()):
        area = message.place.split("/")[1].removesuffix(".py")
        by_area.setdefault(AREAS.get(area, area), []).append((number, message))
    for area, inside in sorted(by_area.items()):
        lines += [area, "-" * len(area), ""]
        for number, message in inside:
            lines += [
                f".. _error-{number}:",
                "",
                docstrings.escape(" ".join(message.text.split())),
                f"    {message.error}, ``{message.place}``",
                "",
            ]
    return "\n".join(lines)


def write(app) -> None:
    site_pages.write(Path(app.srcdir), {"errors.rst": page()})


def give_texts(app, page: str, template: str, context: dict, doctree: object) -> None:
    """The texts for _static/search.js, on the page of the search."""
    if page == "search":
        texts = json.dumps([" ".join(message.text.split()) for message in messages()])
        app.add_js_file(None, body=f"const ERRORS = {texts};".replace("</", "<\\/"))


def setup(app) -> dict:
    app.connect("builder-inited", write, priority=100)
    app.connect("html-page-context", give_texts)
    return {"parallel_read_safe": True}
