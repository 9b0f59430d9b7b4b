"""Results on the project's pages: between two comments stands what a file of benchmarks/results says."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SHOWN = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def pages(root: Path) -> list[Path]:
    """Pages that may show results."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def filled(page: Path, results: Path) -> str:
    """The text of the page with results as they are now; a table that it shows without the notes below stays so."""
    prefix = Path(os.path.relpath(results, page.parent)).as_posix()

    def fill(found: re.Match) -> str:
        begin, name, shown, end = found.groups()
        text = (results / f"{name}.md").read_text(encoding="utf-8").strip()
        if shown and "\n\n" not in shown:
            text = text.split("\n\n")[0]
        # Links lead to files beside the result.
        text = re.sub(r"\]\((\w+\.md)\)", rf"]({prefix}/\1)", text)
        return f"{begin}{text}\n{end}"

    return _SHOWN.sub(fill, page.read_text(encoding="utf-8"))
