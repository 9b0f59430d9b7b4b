"""Tables of pages are what summary.py makes of the committed results; ranges are of the rows that there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import summary
from summaries import convergence, experts, graphs, sources
from summaries.cells import MISSING, Results, against, each, ratio, select, span, table, whole
from summaries.pages import filled, pages

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
    names = [path.stem for path in RESULTS.glob("*.json")]
    assert names
    for name in names:
        script, head = sources.script(name), sources.source(Results(RESULTS), name)
        text = (sources.BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")
        assert "results" in text and f"benchmarks/{script}.py" in head and " on " in head, name
    assert sources.script("model_4_layers_nvidia_h200") == "bench_model"
    assert sources.script("moe_peers_nvidia_h200") == "bench_moe"
    assert sources.script("grouped_matmul_nvidia_h200") == "bench_grouped_matmul"
    with pytest.raises(ValueError, match=r"no benchmark is known to write nothing\.json"):
        sources.script("nothing")


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


def test_a_table_of_made_up_rows(tmp_path):
    """Routings are a range; torchao's run is not there, then lacks a shape."""

    def row(recipe: str, routing: str, shape: str = "1024x4x64x32", mib: float = 8.0) -> dict:
        parts = {"step_owning_x": int((mib + 2) * 2**20)}
        return {"recipe": recipe, "routing": routing, "shape": shape, "memory MiB": mib, "memory": parts}

    def write(name: str, *rows: dict) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")

    first = [row("bf16", "balanced"), row("bf16", "skewed", mib=12.0), row("fp8", "balanced", mib=1024.0)]
    write(experts.RUN, *first, row("bf16", "balanced", "8x2x64x32"))
    head = "| tokens × experts × hidden × dim | bf16 | bf16 and x | FP8 | `master_weights=False` | torchao |"
    without = [head, "|---|--:|--:|--:|--:|--:|"]
    shown = ["| 1024×4×64×32 | 8–12 | 10–14 | 1,024 | - | - |", "| 8×2×64×32 | 8 | 10 | - | - | - |"]
    assert experts.memory(Results(tmp_path)).splitlines() == without + shown
    write(experts.PEERS, row("torchao", "balanced", mib=20.0), row("torchao", "skewed", mib=20.2))
    shown[0] = "| 1024×4×64×32 | 8–12 | 10–14 | 1,024 | - | 20 |"
    assert experts.memory(Results(tmp_path)).splitlines() == without + shown


def test_ways_that_ran_are_compared_with_bf16(tmp_path):
    rows = [
        {"recipe": recipe, "way": way, "ms a step": ms, "x bf16": 10 / ms}
        for way in ("whole_step", "eager")
        for recipe, ms in (("bf16", 10.0), ("fp8", 8.0), ("nvfp4", 20.0))
    ]
    (tmp_path / f"{graphs.NAME}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert graphs.ways(Results(tmp_path)).splitlines()[2:] == [
        "| eager | 10.0 | 8.0 (1.25 ×) | 20.0 (0.50 ×) |",
        "| the whole step in a graph | 10.0 | 8.0 (1.25 ×) | 20.0 (0.50 ×) |",
    ]


def test_losses_are_compared_with_bf16_of_their_seed(tmp_path):
    """Seed 2 has no bf16; a sixth of 12 steps is two."""
    runs = {
        "bf16, seed 0": [1.0] * 12,
        "bf16, seed 1": [2.0] * 12,
        "fp8, seed 0": [1.01, 1.03] * 6,
        "fp8, seed 1": [2.0] * 10 + [1.99, 1.97],
        "fp8, seed 2": [9.0] * 12,
    }
    written = {"runs": {name: {"loss": loss} for name, loss in runs.items()}}
    (tmp_path / f"{convergence.NAME}.json").write_text(json.dumps(written), encoding="utf-8")
    lines = convergence.gaps(Results(tmp_path)).splitlines()
    assert lines[0] == "| steps | fp8, seed 0 | fp8, seed 1 |"
    assert lines[2:4] == ["| 1–2 | +2.00 % | +0.00 % |", "| 3–4 | +2.00 % | +0.00 % |"]
    assert lines[7:] == ["| 11–12 | +2.00 % | -1.00 % |"]


def test_parts_of_nvfp4_are_compared_at_the_end(tmp_path):
    """A third of 12 steps is four; one seed's run may be missing."""
    runs = {
        "bf16, seed 0": [1.0] * 12,
        "bf16, seed 1": [2.0] * 12,
        "nvfp4, seed 0": [9.0] * 8 + [1.01, 1.03] * 2,
        "nvfp4, seed 1": [1.0] * 8 + [2.0] * 4,
        "nvfp4_full, seed 1": [1.98] * 12,
    }
    written = {"runs": {name: {"loss": loss} for name, loss in runs.items()}}
    (tmp_path / f"{convergence.NVFP4}.json").write_text(json.dumps(written), encoding="utf-8")
    lines = convergence.nvfp4_parts(Results(tmp_path)).splitlines()
    assert lines[0] == "| steps 9–12 | seed 0 | seed 1 |"
    assert lines[2:] == ["| nvfp4 | +2.00 % | +0.00 % |", f"| nvfp4_full | {MISSING} | -1.00 % |"]
