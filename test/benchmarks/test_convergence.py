"""Studies: which runs are trained in which order, how results of several machines merge, and what they answer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import convergence
import pytest
import torch
from llm_cases import TINY
from llm_training.config import UsageError
from llm_training.recipes import perturb
from llm_training.study import Run, Study, gap, merged, missing_runs, record_of, table
from llm_training.training import Result, Trainer

STUDIES = sorted((Path(convergence.__file__).parent / "studies").glob("*.json"))
FILE = {"preset": "tiny", "steps": 8, "bf16_steps": 2, "seeds": [0, 1], "draws": {"bf16": 3, "fp8": 2}, "at_once": 2}


@pytest.fixture
def study_file(tmp_path) -> Path:
    file = tmp_path / "tried.json"
    file.write_text(json.dumps(FILE))
    return file


def test_the_smoke_study_runs_as_a_user_runs_it(tmp_path, capsys, monkeypatch):
    """Start, draws and a table, in processes of their own; a failed run is named, and the next command adds it."""
    argv = ["--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        popen = subprocess.Popen
        fails = [sys.executable, "-c", "raise SystemExit(1)"]
        patch.setattr(subprocess, "Popen", lambda run, **options: popen(fails if "fp8-0-0" in run else run, **options))
        assert convergence.main(argv) == 1
    captured = capsys.readouterr()
    order = [line.partition(":")[0] for line in captured.err.splitlines() if ": started" in line]
    assert order[0] == "start-0-0" and sorted(order[1:]) == ["bf16-0-0", "bf16-0-1", "fp8-0-0"]
    assert "Missing: fp8-0-0." in captured.out and "Failed: fp8-0-0; see the logs" in captured.out
    assert convergence.main(argv) == 0
    out = capsys.readouterr().out
    assert "| bf16 | 2 | - | - |" in out and "| fp8 | 1 | " in out and "Missing" not in out
    first = json.loads((tmp_path / "study_smoke.json").read_text())
    assert [len(run["curve"]) for run in first["runs"]] == [12, 12, 12] and first["missing"] == []
    assert len({run["last_third"] for run in first["runs"]}) == 3, "one bit and the recipe change the loss"
    assert not any("command" in run["environment"] for run in first["runs"])
    assert convergence.main([*argv, "--minutes", "0"]) == 0
    assert "started" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": {"bf16": 1}}, "fewer than two draws of bf16"),
        ({"draws": {"bf16": 2, "fp9": 1}}, "unknown recipes fp9"),
        ({"preset": "huge"}, "KeyError"),
        ({"stepz": 3}, "TypeError.*stepz"),
        ({"bf16_steps": 8}, "bf16_steps must be from 0 to steps - 1 = 7"),
    ],
    ids=str,
)
def test_a_file_that_is_no_study_is_refused(study_file, change, message, capsys):
    study_file.write_text(json.dumps(FILE | change))
    assert convergence.main(["--study", str(study_file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UsageError, match=message):
        Study.read(study_file)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_studies_of_the_repository_can_be_read(file):
    study = Study.read(file)
    tokens = study.config.steps * study.config.tokens_per_step
    assert len(study.runs()) == len(set(study.runs())) == len(study.seeds) * sum(study.draws.values())
    assert tokens <= 2**28 and study.config.bf16_steps <= 0.4 * study.config.steps


# --- the answer -------------------------------------------------------------------------------------------------------


def records(start: str, **losses: list[float]) -> list[dict]:
    return [
        {"start": start, "recipe": recipe, "seed": 0, "draw": draw, "last_third": loss, "held_out_loss": loss}
        | {"tokens_per_second": 1.0, "peak_bytes": 2**30}
        for recipe, values in losses.items()
        for draw, loss in enumerate(values)
    ]


def test_a_gap_is_that_of_means_with_the_interval_of_draws():
    runs = records("a", bf16=[0.99, 1.01], fp8=[1.02, 1.04])
    # Deviations of ±1 % in both, with 2 degrees of freedom: variance 2 (%²); error √(2 · (1/2 + 1/2)).
    found = gap(runs, "fp8", "last_third")
    assert found.mean == pytest.approx(3.0) and found.runs == 2
    assert found.half_width == pytest.approx(4.303 * math.sqrt(2))
    single = gap(records("a", bf16=[1.0], fp8=[1.02]), "fp8", "last_third")
    assert (round(single.mean, 9), single.half_width) == (2.0, None)
    assert gap(records("a", bf16=[1.0]), "fp8", "last_third") is None


def test_starts_are_compared_one_by_one():
    """Seeds whose losses lie far apart give the gap of each, not that of all."""
    runs = records("a", bf16=[1.0, 1.0], fp8=[1.01]) + records("b", bf16=[2.0, 2.0], fp8=[2.06])
    assert gap(runs, "fp8", "held_out_loss").mean == pytest.approx(2.0)
    # A recipe without bf16 from its start says nothing.
    assert gap([*runs, *records("c", fp8=[9.0])], "fp8", "held_out_loss").mean == pytest.approx(2.0)


def test_a_diverged_run_is_in_no_mean(study_file):
    lost = record_of(Run("fp8", 0, 1), "a", Result("fp8", 16, losses=[1.0, math.nan], seconds=[1.0, 1.0]), {})
    assert lost["last_third"] is lost["held_out_loss"] is lost["curve"] is None
    whole = record_of(Run("fp8", 0, 1), "a", Result("fp8", 16, losses=[*map(float, range(1000))], seconds=[1.0]), {})
    assert whole["last_third"] == 833 and len(whole["curve"]) == 200 and whole["curve"][0] == 2.0
    runs = [*records("a", bf16=[1.0, 1.0], fp8=[1.01]), lost]
    assert gap(runs, "fp8", "last_third").mean == pytest.approx(1.0)
    assert "| fp8 | 2 | +1.000 % ± 0.000 |" in table(Study.read(study_file), runs)


def test_results_merge_by_start_and_run():
    first = {"config": {"dim": 1}, "starts": {"a": 1}, "runs": records("a", bf16=[1.0, 2.0])}
    second = {"config": {"dim": 1}, "starts": {"b": 2}, "runs": records("a", bf16=[9.0]) + records("b", bf16=[3.0])}
    both = merged([first, second])
    assert [run["last_third"] for run in both["runs"]] == [1.0, 2.0, 3.0] and both["starts"] == {"a": 1, "b": 2}
    with pytest.raises(UsageError, match="other configurations cannot be merged"):
        merged([first, {**second, "config": {"dim": 2}}])


def test_a_lost_start_needs_new_draws_of_bf16(study_file):
    study = Study.read(study_file)
    done = records("a", bf16=[1.0, 1.0, 1.0], fp8=[1.0]) + [
        r | {"seed": 1} for r in records("b", bf16=[1.0], fp8=[1.0])
    ]
    here = missing_runs(study, done, {0: "a", 1: "b"})
    assert here == [Run("fp8", 0, 1), Run("bf16", 1, 1), Run("fp8", 1, 1), Run("bf16", 1, 2)]
    elsewhere = missing_runs(study, done, {})
    assert elsewhere[:3] == [Run("bf16", 0, 0), Run("bf16", 0, 1), Run("fp8", 0, 1)]
    assert [run for run in elsewhere if run.seed == 1][:2] == [Run("bf16", 1, 0), Run("bf16", 1, 1)]


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ("bf16", "fp8"))
def test_a_draw_moves_each_weight_by_one_bit(recipe):
    """In every recipe the same way, so that its draws begin with the same weights."""

    def weights(draw: int, recipe: str = recipe) -> torch.Tensor:
        trainer = Trainer(recipe, TINY, torch.device("cpu"))
        perturb(trainer.model, draw)
        return torch.cat([getattr(p, "hp", p).detach().flatten() for p in trainer.model.parameters()])

    plain, first, second = (weights(draw) for draw in (0, 1, 2))
    for moved in (first, second):
        up, down = (torch.nextafter(plain, torch.full_like(plain, to)) for to in (torch.inf, -torch.inf))
        assert ((moved == up) | (moved == down)).all() and 0.49 < (moved == up).float().mean() < 0.51
    assert not torch.equal(first, second) and torch.equal(first, weights(1, "bf16"))
