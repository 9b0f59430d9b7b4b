"""Docstrings are plain text, with `[M, K]` and names like `add_matmul_`: this makes reStructuredText of it.

A docstring's lines are prose; "name: text", of a parameter or field, which indented lines continue; "- text"; or,
indented after an empty line, code. Words between backticks are code, and links where they are public names.
"""

from __future__ import annotations

import re

import reference

ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")
# A line that begins so is a separate paragraph.
OPENING = re.compile(r"(Returns?|Raises|Source|Sources|Yields)\b")


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines, as autodoc hands them out, as reStructuredText."""
    out: list[str] = []
    for block in _blocks(lines):
        if block[0].startswith("    "):
            out += ["::", "", *block, ""]
            continue
        for kind, name, text in _items(block):
            if kind == "item":
                out += [f"{', '.join(f'``{word}``' for word in name.split(', '))}", f"    {inline(text)}", ""]
            else:
                out += [("- " if kind == "bullet" else "") + inline(text), ""]
    return out


def inline(text: str) -> str:
    """Text with its markup escaped, and code between backticks."""
    parts = re.split(r"(`+)(.+?)\1", text)
    # Three parts a piece of code: the text before it, the backticks, the code.
    out = [escape(parts[0])]
    for code, after in zip(parts[2::3], parts[3::3]):
        out.append(f"\\ {_code(code)}\\ " + escape(after))
    return "".join(out).removeprefix("\\ ")


def _blocks(lines: list[str]) -> list[list[str]]:
    """Lines between empty ones; code stays one block with the empty lines in it."""
    blocks: list[list[str]] = []
    fresh = True
    for line in lines:
        if not line.strip():
            fresh = True
            continue
        is_code = line.startswith("    ")
        if fresh and is_code and blocks and blocks[-1][0].startswith("    "):
            blocks[-1] += ["", line]
        elif fresh:
            blocks.append([line])
        else:
            blocks[-1].append(line)
        fresh = False
    return blocks


def _items(block: list[str]) -> list[tuple[str, str, str]]:
    """(kind, name, text) of each paragraph, bullet or "name: text" in a block."""
    items: list[tuple[str, str, str]] = []
    for line in block:
        text = line.strip()
        if line.startswith(" ") and items:
            kind, name, before = items[-1]
            items[-1] = (kind, name, f"{before} {text}")
        elif found := ITEM.fullmatch(text):
            items.append(("item", found[1], found[2]))
        elif text.startswith("- "):
            items.append(("bullet", "", text[2:]))
        elif items and items[-1][0] == "prose" and not OPENING.match(text):
            items[-1] = ("prose", "", f"{items[-1][2]} {text}")
        else:
            items.append(("prose", "", text))
    return items


def escape(text: str) -> str:
    return re.sub(r"([\\*`|_<>])", r"\\\1", text)


def _code(text: str) -> str:
    full = reference.full_name(text.removesuffix("()"))
    return f":py:obj:`{text} <{full}>`" if full else f"``{text}``"


def _process(app, what, name, obj, options, lines) -> None:
    lines[:] = to_rst(lines)


def _signature(app, what, name, obj, options, signature, returns) -> tuple[str | None, str | None]:
    """`<factory>`, a default of dataclasses, is not valid Python: Sphinx would show the signature as plain text."""
    return signature and signature.replace("<factory>", "..."), returns


def _skip(app, what, name, obj, skip, options) -> bool | None:
    """Fields of NamedTuples have docstrings that say nothing."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True}
