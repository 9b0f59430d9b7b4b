"""The pages of docs/: figures are those of benchmarks/results, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
SHOWN = [
    (name, text)
    for page in PAGES
    for name, text in re.findall(
        r"<!-- results: (\w+) -->\n(.*?)<!-- end of results -->", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
]


def test_pages_show_results():
    assert {name for name, _ in SHOWN} == {"builds_sm_90", "weight_bytes"}


@pytest.mark.parametrize(("name", "shown"), SHOWN, ids=[name for name, _ in SHOWN])
def test_figures_come_from_the_results(name, shown):
    written = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert shown.strip() == written.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (page.parent / path).exists()] == []
