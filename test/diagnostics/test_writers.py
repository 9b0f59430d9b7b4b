"""Writers: what they write can be read again, what they lack is named, and none disturbs training."""

import csv
import json
import math
import re
import shutil
import subprocess
import warnings

import pytest
import torch
from helpers import FP8, mlp, weight
from torch import nn

from torchao_blockwise.diagnostics import CSVWriter, HTMLWriter, NumericsMonitor, writers


def reports(*to, steps: int = 2, model=None):
    """Reports of some steps of a model with layers that are converted, and others that are not."""
    model = nn.ModuleDict({"first": mlp(FP8), "second": mlp()}) if model is None else model
    with NumericsMonitor(model, every=1, what_if=("nvfp4",), writers=to) as monitor:
        found = []
        for _ in range(steps):
            sum(part(weight(20, 64)).square().sum() for part in model.values()).backward()
            found.append(monitor.step())
    return found


def test_csv_can_be_read_again(tmp_path):
    """A file that is there is continued."""
    path = tmp_path / "new" / "numerics.csv"
    written = reports(CSVWriter(path)) + reports(CSVWriter(path), steps=1)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tensors = [(report.step, tensor) for report in written for tensor in report.tensors]
    for row, (step, tensor) in zip(rows, tensors, strict=True):
        assert int(row["step"]) == step
        assert (row["layer"], row["tensor"], row["recipe"]) == (tensor.layer, tensor.tensor, tensor.recipe)
        assert float(row["sqnr_db"]) == tensor.sqnr_db and float(row["amax"]) == tensor.amax
        assert dict(map(int, pair.split(":")) for pair in row["histogram"].split()) == tensor.histogram
        assert tuple(map(float, row["scale_log2"].split())) == tensor.scale_log2
        assert float(row["gradient_to_noise"]) > 0


def test_tensorboard_can_be_read_again(tmp_path):
    """The program's own `SummaryWriter` is a writer, and stays open."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as program:
        written = reports(program)
        program.add_scalar("loss", 0.5, 7)
    read = EventAccumulator(str(tmp_path)).Reload()
    points = read.Scalars("numerics/gradient_to_noise")
    assert [(p.step, pytest.approx(p.value, rel=1e-6)) for p in points] == [
        (r.step, r.gradient_to_noise) for r in written
    ]
    asked = written[1].what_if("nvfp4")["second.2"]
    assert read.Scalars("what_if/nvfp4/second.2")[1].value == pytest.approx(asked, rel=1e-6)
    assert [p.step for p in read.Scalars("loss")] == [7]


@pytest.mark.parametrize("mode", ("offline", "disabled"))
def test_wandb_gets_scalars(mode, tmp_path):
    """The program's own run is a writer, and stays open. Its steps may be larger than the monitor's."""
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode=mode, dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
        run.log({"loss": 2.0}, step=50)
        written = reports(run)
        run.log({"loss": 1.0}, step=60, commit=True)
        logged = dict(run.summary)
    assert logged["numerics/step"] == 1 and logged["loss"] == 1.0
    assert logged["numerics/gradient_to_noise"] == written[1].gradient_to_noise
    figures = {(t.layer, t.kind, t.recipe): t.sqnr_db for t in written[1].tensors}
    assert logged["sqnr_db/first.2/w"] == figures["first.2", "w", "fp8"]


@pytest.mark.parametrize("kind", (CSVWriter, HTMLWriter))
def test_a_place_that_cannot_be_written_is_refused_at_once(kind, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "report", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(tmp_path))):
            kind(path)


def test_a_writer_that_fails_warns_once_and_is_left_out(tmp_path):
    class Broken:
        calls = 0

        def write(self, report):
            self.calls += 1
            raise OSError("no space left on device")

        def close(self): ...

    broken, path = Broken(), tmp_path / "numerics.csv"
    with pytest.warns(UserWarning) as caught:
        written = reports(broken, CSVWriter(path), steps=3)
    assert [str(w.message) for w in caught] == [
        "NumericsMonitor: Broken failed and is not used from now on: OSError: no space left on device"
    ]
    assert broken.calls == 1 and all(written)
    with path.open() as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"0", "1", "2"}


def page_of(path, **options):
    """Reports, the text of the page, and the data in it."""
    found = reports(HTMLWriter(path), **options)
    page = path.read_text(encoding="utf-8")
    return found, page, json.loads(re.search(r"<script>const data = (.*?);</script>", page, re.DOTALL).group(1))


def test_the_page_holds_what_the_reports_say_and_needs_nothing_else(tmp_path):
    found, page, data = page_of(tmp_path / "numerics.html", steps=3)
    assert [r["step"] for r in data["reports"]] == [0, 1, 2]
    assert data["trained"] == {"first.0": "fp8", "first.2": "fp8"} and data["recipes"] == ["fp8", "nvfp4"]
    assert data["layers"] == ["first.0", "first.2", "second.0", "second.2"]
    for row, tensor in zip(data["last"], found[-1].tensors, strict=True):
        assert (row["layer"], row["kind"], row["recipe"]) == (tensor.layer, tensor.kind, tensor.recipe)
        assert row["sqnr_db"] == tensor.sqnr_db and row["histogram"] == {str(k): v for k, v in tensor.histogram.items()}
    for shown, report in zip(data["reports"], found):
        assert shown["ratio"][""] == report.gradient_to_noise
        for tensor in report.tensors:
            curve = shown["sqnr"][tensor.layer][tensor.recipe][tensor.kind]
            assert curve == pytest.approx(tensor.sqnr_db, abs=1e-3)
    assert "/*" not in re.sub(r"<script.*</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|@import|url\()", page)
    links = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert links == {"https://arxiv.org/abs/2505.19115", "http://www.w3.org/2000/svg"}
    assert [file.name for file in tmp_path.iterdir()] == ["numerics.html"]


def test_names_cannot_break_out_of_the_data(tmp_path):
    _, page, data = page_of(tmp_path / "numerics.html", steps=1, model=nn.ModuleDict({"</script><b>": mlp(FP8)}))
    assert data["layers"][0] == "</script><b>.0" and page.count("</script>") == 2


def test_of_many_reports_every_other_one_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "_MOST_REPORTS", 4)
    _, _, data = page_of(tmp_path / "numerics.html", steps=7)
    steps = [r["step"] for r in data["reports"]]
    assert len(steps) <= 4 and steps[0] == 0 and steps[-1] == 6


def test_numbers_that_are_none(tmp_path):
    """NaN, and a layer of zeros, whose error is none: the page's data is JavaScript all the same."""
    model = mlp(FP8)
    with torch.no_grad():
        model[2].weight.hp.zero_()
    model.register_forward_pre_hook(lambda module, args: (args[0].index_fill(0, torch.tensor([2]), math.nan),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (report,) = reports(
            CSVWriter(tmp_path / "a.csv"), HTMLWriter(tmp_path / "a.html"), steps=1, model=nn.ModuleDict({"m": model})
        )
    assert report.first_nonfinite == ("m.0", "x")
    data = re.search(r"<script>(const data = .*?;)</script>", (tmp_path / "a.html").read_text(), re.DOTALL).group(1)
    assert "NaN" in data and "Infinity" in data
    if shutil.which("node"):
        check = "if (!data.last.some((r) => Number.isNaN(r.sqnr_db))) throw 1"
        subprocess.run(["node", "-e", data + check], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_it(tmp_path):
    _, _, data = page_of(tmp_path / "numerics.html", steps=3)
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=3000")
    command = ["chromium", *options, f"file://{tmp_path}/numerics.html"]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    for place, elements in (("ratio", "path"), ("whatif", "circle"), ("curves", "path"), ("scales", "rect")):
        part = re.search(rf'<div id="{place}" class="plot">(.*?)</svg>', drawn, re.DOTALL)
        assert part and part.group(1).count(f"<{elements}") >= 2, place
    axis = re.search(r'<div id="whatif-axis" class="plot">(.*?)</svg>', drawn, re.DOTALL).group(1)
    assert axis.count(" dB</text>") >= 3
    rows = re.search(r"<tbody>(.*?)</tbody>", drawn, re.DOTALL).group(1).count("<tr")
    assert rows == sum(row["trains"] for row in data["last"])
    assert "Step 2 · 4 layers, 2 in low precision · 3 reports" in drawn
