"""Tables of pages are what summary.py makes of the committed results; ranges are of the rows that there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import summary
from summaries import runs, sources
from summaries.cells import MISSING, Results, against, each, ratio, select, span, table, whole
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


@pytest.mark.parametrize("name", MADE)
def test_every_row_has_a_figure(name):
    """A recipe or a shape that the results call otherwise would leave nothing."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in MADE[name].split("\n\n")[0].splitlines())
    assert rows and all(len(row) == len(head) for row in rows)
    # Labels have figures too; they are in words.
    figures = [[cell for cell in row[1:] if any(c.isdigit() for c in cell)] for row in rows]
    assert all(figures)


def test_links_lead_to_results():
    linked = {part.split(")")[0] for text in MADE.values() for part in text.split("](")[1:]}
    assert linked and [name for name in linked if not (RESULTS / name).exists()] == []


@pytest.mark.parametrize("name", MADE)
def test_every_figure_has_a_source(name):
    """Below the table, or by a link in the first column."""
    table, *footnotes = MADE[name].split("\n\n")
    linked = [row for row in table.splitlines()[2:] if row.startswith("| [")]
    assert linked or footnotes
    assert all(line.startswith("[All figures](") for note in footnotes for line in note.splitlines())


def test_a_source_names_command_device_and_versions(tmp_path):
    made = {"device": "NVIDIA X", "torch": "2.11", "torchao": "0.18", "triton": None, "commit": "abc"}
    made["command"] = "--layers 4 --out /somewhere/else --compile"
    (tmp_path / "model_x.json").write_text(json.dumps({"environment": made, "rows": []}), encoding="utf-8")
    assert sources.footnote(Results(tmp_path), ("model_x",)) == (
        "[All figures](model_x.md): `python benchmarks/bench_model.py --layers 4 --compile` on NVIDIA X, "
        "torch 2.11, torchao 0.18, commit abc."
    )


def test_results_name_the_benchmarks_that_wrote_them():
    """Scripts that are there; results of others are of earlier commits."""
    scripts = {path.stem: sources.script(path.stem) for path in RESULTS.glob("*.json")}
    gone = {name for name in scripts.values() if not (RESULTS.parent / f"{name}.py").exists()}
    earlier = {"adapter_memory", "build_report", "engine_agreement", "engine_kernels", "weight_bytes"}
    assert gone == earlier | {"bench_refit"}
    assert scripts["moe_peers_nvidia_h200"] == "bench_moe" and scripts["linear_tracker_nvidia_h200"] == "bench_linear"
    assert scripts["train_llm_moe_tiny_cpu"] == scripts["throughput_125m_nvidia_h100_80gb_hbm3"] == "train_llm"
    for name, script in scripts.items():
        head = sources.source(Results(RESULTS), name)
        assert f"benchmarks/{script}.py" in head and " on " in head and ", commit " in head, name


def test_nothing_but_the_files_is_needed():
    code = "import sys; sys.modules['torch'] = None; import summary; summary.texts(summary.Results(summary.RESULTS))"
    subprocess.run([sys.executable, "-c", code], cwd=RESULTS.parent, check=True)


def test_ranges():
    assert span([1.318, 1.459, 1.4]) == "1.32–1.46"
    assert span([1.318, 1.321]) == "1.32"
    assert span([12.6, 2.0]) == "2.00–12.6"
    assert (ratio(9.994), ratio(9.996)) == ("9.99", "10.0")
    assert span([5737.4, 5744.1], whole) == "5,737–5,744"
    assert span([]) == MISSING
    assert each({"a": span([1]), "b": span([]), "": "2.00"}) == "a 1.00, 2.00"
    assert each({"b": MISSING}) == MISSING
    assert table(("what", "×"), [("a", span([0.5]))]) == "| what | × |\n|---|--:|\n| a | 0.50 |"


def test_rows_are_compared_with_their_like():
    rows = [{"recipe": "fp8", "at": at, "us": us} for at, us in ((1, 6.0), (2, 8.0), (3, 1.0), (4, None))]
    others = [{"recipe": "bf16", "at": at, "us": us} for at, us in ((2, 4.0), (1, 2.0), (4, 1.0), (5, 1.0))]
    assert against(rows, others, "us", ("at",)) == [3.0, 2.0]
    assert [row["at"] for row in select(rows + others, at=(1, 5))] == [1, 1, 5]
    assert select(rows, recipe="bf16") == []


def test_losses_are_compared_with_bf16_of_their_seed(tmp_path):
    """Seed 2 has no bf16; a sixth of 12 steps is two."""
    trained = {
        "bf16, seed 0": [1.0] * 12,
        "bf16, seed 1": [2.0] * 12,
        "fp8, seed 0": [1.01, 1.03] * 6,
        "fp8, seed 1": [2.0] * 10 + [1.99, 1.97],
        "fp8, seed 2": [9.0] * 12,
    }
    written = {"runs": {name: {"loss": loss} for name, loss in trained.items()}}
    (tmp_path / f"{runs.CONVERGENCE}.json").write_text(json.dumps(written), encoding="utf-8")
    lines = runs.convergence(Results(tmp_path)).splitlines()
    assert lines[0] == "| steps | fp8, seed 0 | fp8, seed 1 |"
    assert lines[2:4] == ["| 1–2 | +2.00 % | +0.00 % |", "| 3–4 | +2.00 % | +0.00 % |"]
    assert lines[7:] == ["| 11–12 | +2.00 % | -1.00 % |"]


def test_parts_of_nvfp4_are_compared_at_the_end(tmp_path):
    """A third of 12 steps is four; one seed's run may be missing."""
    trained = {
        "bf16, seed 0": [1.0] * 12,
        "bf16, seed 1": [2.0] * 12,
        "nvfp4, seed 0": [9.0] * 8 + [1.01, 1.03] * 2,
        "nvfp4, seed 1": [1.0] * 8 + [2.0] * 4,
        "nvfp4_full, seed 1": [1.98] * 12,
    }
    written = {"runs": {name: {"loss": loss} for name, loss in trained.items()}}
    (tmp_path / f"{runs.NVFP4}.json").write_text(json.dumps(written), encoding="utf-8")
    lines = runs.nvfp4_parts(Results(tmp_path)).splitlines()
    assert lines[0] == "| steps 9–12 | seed 0 | seed 1 |"
    assert lines[2:] == ["| nvfp4 | +2.00 % | +0.00 % |", f"| nvfp4_full | {MISSING} | -1.00 % |"]
