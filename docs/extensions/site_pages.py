"""Pages that are written as the site is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, pages: Mapping[str, str]) -> None:
    """Write {file name: text}; unchanged pages are not written, so that Sphinx does not read them again."""
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
