"""The README shows what is: its example runs and prints what it shows, its figures are those of benchmarks/results."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = re.findall(r"<!-- results: (\w+) -->\n(.*?)<!-- end of results -->", README, flags=re.DOTALL)


def block(marker: str) -> str:
    """The fenced block after a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)\n```", README, flags=re.DOTALL).group(1)


@pytest.mark.usefixtures("no_interpreter")
def test_the_example_prints_what_is_shown():
    printed, namespace = io.StringIO(), {"__name__": "readme"}
    with contextlib.redirect_stdout(printed):
        exec(compile(block("example"), "README.md", "exec"), namespace)
    assert printed.getvalue().strip() == block("example-output")


def test_all_results_are_found():
    assert {name for name, _ in RESULTS} == {"train_llm_cpu", "convergence_1b_nvidia_h200", "summary_graphs"}


@pytest.mark.parametrize(("name", "shown"), RESULTS, ids=[name for name, _ in RESULTS])
def test_figures_come_from_the_results(name, shown):
    written = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert shown.split("\n\n")[0].strip() == written.split("\n\n")[0].strip()


def test_the_processor_of_the_figures_is_named():
    written = (ROOT / "benchmarks" / "results" / "train_llm_cpu.json").read_text(encoding="utf-8")
    assert f"on a CPU ({json.loads(written)['environment']['device']})" in README


def test_links_lead_somewhere():
    paths = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert paths and [p for p in paths if not (ROOT / p).exists()] == []
