"""Writers: what they write can be read again, what they lack is said in one sentence, and none disturbs training."""

from __future__ import annotations

import csv
import importlib
import math
import types
import warnings

import pytest
import torch
from helpers import FP8, mlp, weight
from torch import nn

from torchao_blockwise.diagnostics import CSVWriter, HTMLWriter, NumericsMonitor, TensorBoardWriter, WandbWriter

pytestmark = pytest.mark.usefixtures("no_interpreter")


def reports(writers, steps: int = 2, what_if=("nvfp4",), model=None):
    """Reports of some steps of a model with one layer that is converted, and one that is not."""
    model = nn.Sequential(*mlp(FP8), nn.Linear(32, 16)) if model is None else model
    with NumericsMonitor(model, every=1, what_if=what_if, writers=writers) as monitor:
        found = []
        for _ in range(steps):
            model(weight(20, 64)).square().sum().backward()
            found.append(monitor.step())
    return found


def test_csv_can_be_read_again(tmp_path):
    path = tmp_path / "new" / "numerics.csv"
    written = reports([CSVWriter(path)])
    written += reports([CSVWriter(path)], 1)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tensors = [(report.step, tensor) for report in written for tensor in report.tensors]
    assert len(rows) == len(tensors) > 0
    for row, (step, tensor) in zip(rows, tensors):
        assert int(row["step"]) == step
        assert (row["layer"], row["tensor"], row["recipe"]) == (tensor.layer, tensor.tensor, tensor.recipe)
        assert float(row["sqnr_db"]) == tensor.sqnr_db and float(row["amax"]) == tensor.amax
        assert dict(map(int, pair.split(":")) for pair in row["histogram"].split()) == tensor.histogram
        assert tuple(map(float, row["scale_log2"].split())) == tensor.scale_log2
        assert float(row["gradient_to_noise"]) > 0


def test_tensorboard_can_be_read_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = reports([TensorBoardWriter(tmp_path)])
    read = EventAccumulator(str(tmp_path)).Reload()
    points = read.Scalars("numerics/gradient_to_noise")
    assert [p.step for p in points] == [0, 1]
    assert [p.value for p in points] == pytest.approx([r.gradient_to_noise for r in written], rel=1e-6)
    assert read.Scalars("what_if/nvfp4/3")[1].value == pytest.approx(written[1].what_if("nvfp4")["3"], rel=1e-6)
    histogram = read.Histograms("scale_log2/0/x rowwise")[0].histogram_value
    tensor = written[0].tensors[0]
    assert (tensor.layer, str(tensor.kind), tensor.recipe) == ("0", "x rowwise", "fp8")
    assert histogram.num == sum(tensor.histogram.values())
    # Empty buckets are filled in by TensorBoard.
    assert [n for n in histogram.bucket if n] == list(tensor.histogram.values())


class Run:
    """As a run of Weights & Biases."""

    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.SimpleNamespace(run=None, init=lambda **options: Run())
    own = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: module if name == "wandb" else own(name))
    return module


def test_wandb_is_given_scalars(fake_wandb):
    run = Run()
    written = reports([WandbWriter(run)])
    assert [values["numerics/step"] for values in run.logged] == [0, 1] and not run.finished
    for values, report in zip(run.logged, written):
        assert values["numerics/gradient_to_noise"] == report.gradient_to_noise
        assert values["sqnr_db/2/w"] == next(
            t.sqnr_db for t in report.tensors if (t.layer, t.tensor, t.recipe) == ("2", "w", "fp8")
        )
        assert all(isinstance(value, (int, float)) for value in values.values())


def test_wandb_runs_of_the_program_are_left_open(fake_wandb):
    own = WandbWriter(project="numerics")
    fake_wandb.run = Run()
    shared = WandbWriter()
    reports([own, shared], 1)
    assert own._run.finished and not fake_wandb.run.finished and len(fake_wandb.run.logged) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (
            lambda path: TensorBoardWriter(path),
            "TensorBoardWriter: needs the package tensorboard; pip install tensorboard",
        ),
        (lambda path: WandbWriter(), "WandbWriter: needs the package wandb; pip install wandb, or use CSVWriter"),
    ),
    ids=("tensorboard", "wandb"),
)
def test_a_missing_package_is_named(make, message, tmp_path, monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", none)
    with pytest.raises(ImportError, match=message):
        make(tmp_path)


@pytest.mark.parametrize("kind", (CSVWriter, HTMLWriter))
def test_a_place_that_cannot_be_written_is_refused(kind, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"{kind.__name__}: cannot write .*; choose another path"):
        kind(tmp_path / "file" / "report")
    with pytest.raises(ValueError, match="choose another path"):
        kind(tmp_path)
    kind(tmp_path / "later")
    assert not (tmp_path / "later").exists()


class Broken:
    def __init__(self):
        self.calls = 0

    def write(self, report):
        self.calls += 1
        raise OSError("no space left on device")

    def close(self): ...


def test_a_writer_that_fails_warns_once_and_is_left_out(tmp_path):
    broken, path = Broken(), tmp_path / "numerics.csv"
    with pytest.warns(UserWarning) as caught:
        written = reports([broken, CSVWriter(path)], 3)
    assert [str(w.message) for w in caught] == [
        "NumericsMonitor: Broken failed and is left out from now on: OSError: no space left on device"
    ]
    assert broken.calls == 1 and all(written)
    with path.open() as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"0", "1", "2"}


def test_numbers_that_are_none(tmp_path):
    """NaN, and a layer of zeros, whose error is none."""
    model = mlp(FP8)
    with torch.no_grad():
        model[2].weight.hp.zero_()
    model.register_forward_pre_hook(lambda module, args: (args[0].index_fill(0, torch.tensor([2]), math.nan),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (report,) = reports([CSVWriter(tmp_path / "a.csv"), HTMLWriter(tmp_path / "a.html")], 1, model=model)
    assert report.first_nonfinite == ("0", "x")
    assert "first_nonfinite" in (tmp_path / "a.html").read_text()
