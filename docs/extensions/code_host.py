"""Pages are plain Markdown, so that code hosts show them. This adds the tree of pages and the links of the site."""

from __future__ import annotations

import re
from pathlib import Path

import site_pages

ROOT = Path(__file__).resolve().parents[2]
# Pages below a page that does not list them.
BELOW = {
    "index": (
        "Get started <learn/index>",
        "guides",
        "performance",
        "convergence",
        "API <api/index>",
        "Design <internals>",
    ),
    "performance": ("results/index",),
}
# Pages whose lists are the pages below them.
LISTS = ("guides", "internals")


def _links(text: str) -> str:
    """Links to results, tutorials and files of the root lead to their pages.

    A link that is called by its file, [numerics.md](numerics.md), is called by the page's title.
    """
    text = re.sub(r"\]\((?:\.\./)?(CHANGELOG|CONTRIBUTING)\.md\)", lambda found: f"]({found[1].lower()}.md)", text)
    text = re.sub(r"\[\w+\.md\]\((\w+\.md(?:#[\w-]+)?)\)", r"[](\1)", text)
    text = re.sub(r"\]\(tutorials/(\w+)\.py\)", r"](learn/\1)", text)
    return re.sub(r"\]\((?:\.\./)+benchmarks/results/(\w+)\.md\)", r"](results/\1.md)", text)


def _tree(entries: tuple[str, ...] | list[str], caption: str = "") -> str:
    options = f":hidden:\n:caption: {caption}\n" if caption else ":hidden:\n"
    lines = "\n".join(entries)
    return f"\n\n```{{toctree}}\n{options}\n{lines}\n```\n"


def _read(app, page: str, text: list[str]) -> None:
    text[0] = _links(text[0])
    if page in BELOW:
        text[0] += _tree(BELOW[page])
    if page in LISTS:
        for section in text[0].split("\n## "):
            if listed := re.findall(r"^- \[.*?\]\((\w+)\.\w+\)", section, re.MULTILINE):
                text[0] += _tree(listed, section.splitlines()[0].removeprefix("# "))


def write(folder: Path) -> None:
    """Copies of the files of the root that are pages too."""
    texts = {name.lower(): (ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    site_pages.write(folder, {name: text.replace("](docs/", "](") for name, text in texts.items()})


def setup(app) -> dict:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
