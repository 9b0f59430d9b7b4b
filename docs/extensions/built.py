"""Checks the built pages: broken links within the site, and pictures without a text, are warnings."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

logger = logging.getLogger(__name__)


class Page(HTMLParser):
    """The links, anchors and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if "href" in found or ("src" in found and tag != "iframe"):
            self.links.append(found.get("href", found.get("src", "")))
        # Thumbnails of the list of tutorials are hidden.
        if tag == "img" and not found.get("alt", "").strip() and not found.get("src", "").endswith("_thumb.png"):
            self.without_text.append(found.get("src", ""))


def faults(folder: Path) -> list[str]:
    """A line for each fault of the pages in `folder`."""
    # Files of the theme are not pages.
    files = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in files}
    found = []
    for path, page in pages.items():
        where = path.relative_to(folder)
        found += [f"{where}: a picture without a text: {source}" for source in page.without_text]
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("", "#"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{where}: leads nowhere: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: no such place: {link}")
    return found


def check(app, exception: Exception | None) -> None:
    if exception is None and app.builder.name == "html":
        for fault in faults(Path(app.outdir).resolve()):
            logger.warning(fault)


def setup(app) -> dict:
    app.connect("build-finished", check, priority=900)
    return {"parallel_read_safe": True}
