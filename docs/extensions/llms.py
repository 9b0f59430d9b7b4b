"""llms.txt: the pages of the site with a line about each, and where their plain text is. See llmstxt.org."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docutils import nodes

ABOUT = (
    "A torchao plugin that trains transformers in blockwise FP8 (as in DeepSeek-V3) and NVFP4 with PyTorch. One "
    "quantize_ call makes the linear layers and experts of a model run their three GEMMs in low precision."
)
# Longer first paragraphs are cut.
LONGEST = 240


def describe(doctree: nodes.document) -> str:
    """The first paragraph of a page, as text."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if text and isinstance(paragraph.parent, nodes.section):
            return text if len(text) <= LONGEST else text[: text.rfind(" ", 0, LONGEST)] + " …"
    return ""


def in_order(includes: dict[str, list[str]], page: str = "index") -> Iterator[str]:
    """All pages as the tables of contents have them."""
    yield page
    for below in includes.get(page, ()):
        yield from in_order(includes, below)


def kind(page: str) -> str:
    if page.startswith(("learn/", "gpu/")):
        return "Tutorials"
    return "API" if page.startswith("api/") else "Guides"


def write(app, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    base = app.config.html_baseurl
    sections: dict[str, list[str]] = {"Tutorials": [], "Guides": [], "API": []}
    for page in dict.fromkeys(in_order(app.env.toctree_includes)):
        if page == "index":
            continue
        title = app.env.titles[page].astext()
        about = describe(app.env.get_doctree(page))
        suffix = Path(app.env.doc2path(page)).suffix
        sections[kind(page)].append(f"- [{title}]({base}_sources/{page}{suffix}.txt): {about}")
    text = f"# torchao_blockwise\n\n> {ABOUT}\n"
    for name, lines in sections.items():
        text += f"\n## {name}\n\n" + "\n".join(lines) + "\n"
    (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def setup(app) -> dict:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
