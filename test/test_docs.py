"""docs/, README and CONTRIBUTING: figures come from the results, examples print what is shown, links lead somewhere."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a build of the site writes beside the pages.
GENERATED = ("api", "learn", "results")
PAGES = [page for page in sorted((ROOT / "docs").glob("**/*.md")) if page.parent.name not in GENERATED]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
RESULTS = ROOT / "benchmarks" / "results"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


SHOWN = [
    (name, text)
    for page in PAGES
    for name, text in re.findall(
        r"<!-- results: (\w+) -->\n(.*?)<!-- end of results -->", text_of(page), flags=re.DOTALL
    )
]


@pytest.mark.parametrize(("name", "shown"), SHOWN, ids=[name for name, _ in SHOWN])
def test_figures_come_from_the_results(name, shown):
    written = text_of(RESULTS / f"{name}.md")
    # Links of a table lead to the files beside it.
    linked = re.sub(r"\]\((\w+\.md)\)", r"](../benchmarks/results/\1)", written)
    # Footnotes may be left out, in the README with a note below.
    first = [text.split("\n\n")[0].strip() for text in (linked, written)]
    assert shown.strip() in (linked.strip(), *first) or shown.split("\n\n")[0].strip() in first


def test_results_are_shown():
    assert len(SHOWN) > 20
    written = json.loads(text_of(RESULTS / "train_llm_cpu.json"))
    assert f"on a CPU ({written['environment']['device']})" in text_of(ROOT / "README.md")


# What is no measurement of ours: how the board's counter works, what follows by arithmetic, sizes that are needed.
RECKONED = (
    "renewed every 20 to 100 ms",
    "an estimated 2 µs",
    "at 4 TB/s the four schedulers",
    "are 101 and 165 µs of issue slots",
    "hold 128 GiB of",
)
MEASURED = re.compile(r"\d ?(?:µs|ms|TB/s|TFLOP/s|tokens/s|GiB|MiB)(?!\w)|\d\.\d+ ?×(?!\d)")


def typed(text: str) -> list[str]:
    """Lines with a measured figure outside of code and of tables of results."""
    for pattern in (r"<!-- results: .*?<!-- end of results -->", r"```.*?```"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for words in RECKONED:
        text = text.replace(words, "")
    return [line for line in text.splitlines() if MEASURED.search(line)]


@pytest.mark.parametrize(
    # History is written down by hand, and says so.
    "page",
    [page for page in PAGES if page.name not in ("performance_diary.md", "README.md")],
    ids=lambda page: page.name,
)
def test_no_measured_figure_is_typed_by_hand(page):
    assert typed(text_of(page)) == []


def test_typed_figures_are_seen():
    lines = ["took 0.91 ms", "1.24 × bf16", "4.3 TB/s", "1.5×"]
    shown = "<!-- results: x -->\n| 3 ms |\n<!-- end of results -->\n```\n2 ms\n```\n1×128 blocks, 2 · 64\n"
    assert typed(shown + "\n".join(lines)) == lines


# Said of a folder as a whole, or of each file in it by its name's beginning.
COVERED = ("_compat/*", "cli/*", "*/kernels_*.py", "*/gluon_*.py", "*/__init__.py", "__*__.py")
# A file a backend of products, and what is about one operation alone.
COVERED += ("ops/gemm/*/*.py", "ops/*/*/layout.py", "ops/fused/*.py")


def test_the_table_of_rooms_names_every_module():
    package = ROOT / "torchao_blockwise"
    rooms = text_of(ROOT / "docs" / "design.md").split("## Rooms")[1].split("```")[1]
    words = set(re.findall(r"\w+", rooms))
    files = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    unnamed = [str(f) for f in files if f.stem not in words and not any(f.match(pattern) for pattern in COVERED)]
    folders = {path.name for path in package.rglob("*") if path.is_dir()} - {"__pycache__"}
    gone = set(re.findall(r"(\w+)\.py", rooms)) - {f.stem for f in files}
    gone |= set(re.findall(r"(\w+)/", rooms)) - folders
    assert (unnamed, folders - words, gone) == ([], set(), set())


def blocks(page: Path, marker: str) -> dict[str, str]:
    """{name: the fenced block after `<!-- marker: name -->`}."""
    return dict(re.findall(rf"<!-- {marker}: (\w+) -->\n```\w*\n(.*?)\n```", text_of(page), flags=re.DOTALL))


EXAMPLES = [page for page in PAGES if blocks(page, "example")]
NEEDS = {"fusion.md": "transformers", "integrations.md": "transformers", "saving.md": "safetensors"}


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_examples_print_what_is_shown(page, tmp_path, monkeypatch):
    """One after the other: a later one may use what an earlier one made."""
    assert len(EXAMPLES) > 7
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    shown, namespace = blocks(page, "output"), {"__name__": "docs"}
    for name, code in blocks(page, "example").items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), namespace)
        assert printed.getvalue().strip() == shown.get(name, ""), name


# docs/extensions/ writes it beside the pages; git does not have it.
MADE_WITH_THE_SITE = {"errors.rst"}


FOLDERS = ("benchmarks", "docs", "test", "torchao_blockwise")
FILES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")]


@every_page
def test_links_lead_somewhere_and_files_that_are_named_exist(page):
    """`ops/registry.py` and `ops/device/` by the end of their path, from wherever a reader is."""
    paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [path for path in paths if path not in MADE_WITH_THE_SITE and not (page.parent / path).exists()] == []
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert [name for name in named if not any(f"/{name}" in f"/{file}/" for file in FILES)] == []
