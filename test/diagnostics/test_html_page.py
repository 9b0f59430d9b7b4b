"""The HTML page: one file, complete in itself, that holds what the reports say and draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from helpers import FP8, mlp, weight
from torch import nn

from torchao_blockwise.diagnostics import HTMLWriter, NumericsMonitor, html_page

pytestmark = pytest.mark.usefixtures("no_interpreter")


def written(path, steps: int = 3, names=("first", "second")):
    """Reports, and the text of the page."""
    model = nn.ModuleDict({names[0]: mlp(FP8), names[1]: mlp()})
    with NumericsMonitor(model, every=1, what_if=("nvfp4",), writers=[HTMLWriter(path)]) as monitor:
        reports = []
        for _ in range(steps):
            sum(part(weight(20, 64)).square().sum() for part in model.values()).backward()
            reports.append(monitor.step())
    return reports, path.read_text(encoding="utf-8")


def data_of(page: str):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_page_holds_what_the_reports_say(tmp_path):
    reports, page = written(tmp_path / "numerics.html")
    data = data_of(page)
    assert [r["step"] for r in data["reports"]] == [0, 1, 2]
    assert data["trained"] == {"first.0": "fp8", "first.2": "fp8"} and data["recipes"] == ["fp8", "nvfp4"]
    assert data["layers"] == ["first.0", "first.2", "second.0", "second.2"]
    assert len(data["last"]) == len(reports[-1].tensors)
    for row, tensor in zip(data["last"], reports[-1].tensors):
        assert (row["layer"], row["kind"], row["recipe"]) == (tensor.layer, str(tensor.kind), tensor.recipe)
        assert row["sqnr_db"] == tensor.sqnr_db and row["histogram"] == {str(k): v for k, v in tensor.histogram.items()}
    for shown, report in zip(data["reports"], reports):
        assert shown["ratio"][""] == report.gradient_to_noise
        for tensor in report.tensors:
            assert shown["sqnr"][tensor.layer][tensor.recipe][str(tensor.kind)] == pytest.approx(
                tensor.sqnr_db, abs=1e-3
            )


def test_the_page_needs_nothing_else(tmp_path):
    _, page = written(tmp_path / "numerics.html", 1)
    assert "/*" not in re.sub(r"<script.*</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|@import|url\()", page)
    links = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert links == {"https://arxiv.org/abs/2505.19115", "http://www.w3.org/2000/svg"}
    assert [file.name for file in tmp_path.iterdir()] == ["numerics.html"]
    assert "prefers-color-scheme: dark" in page


def test_names_cannot_break_out_of_the_data(tmp_path):
    _, page = written(tmp_path / "numerics.html", 1, names=("</script><b>", "plain"))
    assert data_of(page)["layers"][0] == "</script><b>.0" and page.count("</script>") == 2


def test_of_many_reports_every_other_one_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(html_page, "_MOST_REPORTS", 4)
    reports, page = written(tmp_path / "numerics.html", 7)
    steps = [r["step"] for r in data_of(page)["reports"]]
    assert len(steps) <= 4 and steps[0] == 0 and steps[-1] == reports[-1].step == 6


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_it(tmp_path):
    _, page = written(tmp_path / "numerics.html")
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        "--virtual-time-budget=3000",
    ]
    done = subprocess.run([*command, f"file://{tmp_path}/numerics.html"], capture_output=True, text=True, timeout=120)
    drawn = done.stdout
    for place, elements in (("ratio", "path"), ("whatif", "circle"), ("curves", "path"), ("scales", "rect")):
        part = re.search(rf'<div id="{place}" class="plot">(.*?)</svg>', drawn, re.DOTALL)
        assert part and part.group(1).count(f"<{elements}") >= 2, place
    axis = re.search(r'<div id="whatif-axis" class="plot">(.*?)</svg>', drawn, re.DOTALL).group(1)
    assert axis.count(" dB</text>") >= 3
    rows = re.search(r"<tbody>(.*?)</tbody>", drawn, re.DOTALL).group(1).count("<tr")
    assert rows == sum(row["trains"] for row in data_of(page)["last"])
    assert "Step 2 · 4 layers, 2 in low precision · 3 reports" in drawn
