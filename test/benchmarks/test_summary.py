"""Tables of pages are what summary.py makes of the committed results."""

from pathlib import Path

import pytest
import summary
from llm_training.study import Gap
from summaries import sources, studies
from summaries.cells import Results, ratio
from summaries.sources import filled, pages

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MADE = summary.texts(Results(RESULTS))


def test_every_summary_has_its_file():
    assert {path.stem for path in RESULTS.glob("summary_*.md")} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_committed_tables_are_those_of_the_results(name):
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == MADE[name], "run python benchmarks/summary.py"


@pytest.mark.parametrize("page", pages(RESULTS.parents[1]), ids=lambda page: page.name)
def test_pages_show_results_as_they_are(page):
    assert page.read_text(encoding="utf-8") == filled(page, RESULTS), "run python benchmarks/summary.py"


def test_a_page_is_filled(tmp_path):
    """With notes where it had them or had nothing; links lead from the page to the results."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "x.md").write_text("| [a](x.md) | 2 |\n\nNote.\n", encoding="utf-8")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    shown = "before\n<!-- results: x -->\n{}<!-- end of results -->\nafter\n"
    row, note = "| [a](../benchmarks/results/x.md) | 2 |\n", "\nNote.\n"
    for old, new in (("", row + note), ("| [a](x.md) | 1 |\n", row), ("| 1 |\n\nOld.\n", row + note)):
        page.write_text(shown.format(old), encoding="utf-8")
        assert filled(page, results) == shown.format(new)
    # Notes of several lines are a list.
    (results / "x.md").write_text("| [a](x.md) | 2 |\n\nNote.\nNote 2.\n", encoding="utf-8")
    assert filled(page, results) == shown.format(row + "\n- Note.\n- Note 2.\n")


def test_a_part_of_a_table_is_shown():
    table = "| recipe | mode | ms |\n|---|---|--:|\n| a | eager | 3 |\n| b | compiled | 2 |\n\nNote."
    assert sources.part(table, "ms | recipe") == "| ms | recipe |\n| --: | --- |\n| 3 | a |\n| 2 | b |"
    assert sources.part(table, "ms", "mode compiled") == "| ms |\n| --: |\n| 2 |"
    with pytest.raises(ValueError, match="us"):
        sources.part(table, "us")


@pytest.mark.parametrize("name", sorted(MADE.keys() - {"summary_headlines"}))
def test_every_row_has_a_figure(name):
    """A recipe or a shape that the results call otherwise would leave nothing."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in MADE[name].split("\n\n")[0].splitlines())
    assert rows and all(len(row) == len(head) for row in rows)
    # Labels have figures too; they are in words.
    figures = [[cell for cell in row[1:] if any(c.isdigit() for c in cell)] for row in rows]
    assert all(figures)


def test_results_name_the_benchmarks_that_wrote_them():
    """Scripts that are there; results of others are of earlier commits."""
    scripts = {path.stem: sources.script(path.stem) for path in RESULTS.glob("*.json")}
    gone = {name for name in scripts.values() if not (RESULTS.parent / f"{name}.py").exists()}
    earlier = {"build_report", "engine_agreement", "engine_kernels", "weight_bytes"}
    assert gone == earlier | {"bench_refit"}
    assert scripts["moe_peers_nvidia_h200"] == "bench_moe" and scripts["linear_tracker_nvidia_h200"] == "bench_linear"
    assert scripts["train_llm_moe_tiny_cpu"] == scripts["throughput_125m_nvidia_h100_80gb_hbm3"] == "train_llm"
    for name, script in scripts.items():
        head = sources.source(Results(RESULTS), name)
        assert f"benchmarks/{script}.py" in head and " on " in head and ", commit " in head, name


def test_ratios_have_three_digits():
    assert (ratio(9.994), ratio(9.996)) == ("9.99", "10.0")


def test_a_gap_of_what_twice_the_tokens_give_needs_twice_the_tokens():
    assert studies._more_tokens(Gap(7.0, 0.0, 2), fall=7.0) == "+100.0 % ± 0.0"
    assert studies._more_tokens(Gap(0.0, 7.0, 2), fall=7.0) == "+0.0 % ± 100.0"
    assert studies._tokens_factor(Gap(-7.0, 14.0, 2), fall=7.0) == (0.5, 2.0)
