"""Studies: which runs are trained in which order, how results of several machines merge, and what they answer."""

import json
import math
import statistics
from pathlib import Path

import convergence
import pytest
import torch
from llm_cases import MODELS, TINY
from llm_training.config import UsageError
from llm_training.operand_errors import error_percent, operand_errors
from llm_training.recipes import perturb
from llm_training.study import Gap, Run, Study, gap, growth, merged, missing_runs, quantile, record_of, table
from llm_training.training import Result, Trainer

STUDIES = sorted((Path(convergence.__file__).parent / "studies").glob("*.json"))
FILE = {"preset": "tiny", "steps": 8, "bf16_steps": 2, "seeds": [0, 1], "draws": {"bf16": 3, "fp8": 2}, "at_once": 2}
# What stands for a process of one run: it writes what a run does; `slow` sleeps, `bad` fails.
STAND_IN = """
import json, os, pathlib, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, (recipe, seed, draw) = pathlib.Path(args["--out"]), args["--run"].rsplit("-", 2)
with (out / "order.txt").open("a") as log:
    log.write(args["--run"] + "\\n")
with (out / "gpus.txt").open("a") as log:
    log.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
if recipe == "start":
    (out / f"start_seed_{seed}.pt").touch()
    content = {"digest": out.name + seed, "seed": int(seed), "operand_errors": {"x": {"fp8": {"median": 1, "max": 2}}}}
else:
    time.sleep(60 if recipe in SLOW else 0)
    if recipe in BAD:
        sys.exit(1)
    loss = {"bf16": 1.0, "fp8": 1.01, "nvfp4": 1.1}[recipe] + 0.001 * int(draw)
    start = json.loads((out / f"start-{seed}-0.json").read_text())["digest"]
    content = {"recipe": recipe, "seed": int(seed), "draw": int(draw), "start": start, "last_third": loss,
               "held_out_loss": loss, "tokens_per_second": 5.0, "seconds": 1.0, "peak_bytes": None,
               "environment": {"device": "a CPU"}}
# At once, because the parent may read meanwhile.
(out / f"{args['--run']}.tmp").write_text(json.dumps(content))
(out / f"{args['--run']}.tmp").rename(out / f"{args['--run']}.json")
"""


@pytest.fixture
def study_file(tmp_path) -> Path:
    file = tmp_path / "tried.json"
    file.write_text(json.dumps(FILE))
    return file


@pytest.fixture
def command(tmp_path, study_file, monkeypatch, capsys):
    """The program with stand-ins for its runs: (options, slow recipes, recipes that fail) -> (code, output)."""
    program = tmp_path / "stand_in.py"
    monkeypatch.setattr(convergence, "__file__", str(program))
    monkeypatch.setattr(convergence, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(convergence, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(convergence, "_SETUP_SECONDS", 0)

    def called(*options: str, slow: tuple = (), bad: tuple = (), out: str = "out") -> tuple[int, str]:
        program.write_text(f"SLOW, BAD = {slow!r}, {bad!r}\n{STAND_IN}")
        code = convergence.main(["--study", str(study_file), "--out", str(tmp_path / out), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return called


def trained(tmp_path, out: str = "out") -> list[str]:
    return (tmp_path / out / "order.txt").read_text().split()


def test_the_smoke_study_runs_as_a_user_runs_it(tmp_path, capsys):
    """Start, draws and a table, each in a separate process; a second command finds all of it done."""
    assert convergence.main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| bf16 | 2 | - | - |" in out and "| fp8 | 1 | " in out and "Missing" not in out
    assert "| dy | fp8_1x128 along tokens |" in out
    first = json.loads((tmp_path / "study_smoke.json").read_text())
    assert [len(run["curve"]) for run in first["runs"]] == [12, 12, 12] and first["missing"] == []
    assert len({run["last_third"] for run in first["runs"]}) == 3, "one bit and the recipe change the loss"
    assert not any("command" in run["environment"] for run in first["runs"])
    assert convergence.main(["--out", str(tmp_path)]) == 0
    assert "started" not in capsys.readouterr().err


def test_runs_that_fail_or_are_cut_off_are_named_and_added_later(command, tmp_path):
    code, out = command("--minutes", "0.05", slow=("fp8",))
    assert code == 1 and "cut off; it goes on from its last checkpoint" in out and "Missing: fp8-0-0" in out
    code, out = command(bad=("fp8",), out="failing")
    assert code == 1 and "Failed: fp8-0-0, fp8-0-1, fp8-1-0, fp8-1-1; see the logs" in out
    assert "bf16-1-2" in trained(tmp_path, "failing"), "what comes behind a failed run"
    code, _ = command(out="failing")
    of_bf16 = [run for run in trained(tmp_path, "failing") if run.startswith("bf16")]
    assert code == 0 and len(of_bf16) == len(set(of_bf16)), "what is done is not done again"


@pytest.mark.parametrize(("named", "gpus"), [(None, "012"), ("5,7,8", "57")], ids=str)
def test_runs_are_spread_over_the_gpus_of_the_process(command, tmp_path, monkeypatch, named, gpus):
    """at_once on each GPU, those that CUDA_VISIBLE_DEVICES names where it does."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    code, out = command("--minutes", "0.06", slow=("bf16", "fp8"))
    of_runs = gpus * FILE["at_once"]
    assert code == 1 and out.count("cut off") == len(of_runs)
    # A start on each of two GPUs, then the runs.
    assert sorted((tmp_path / "out" / "gpus.txt").read_text().split()) == sorted(gpus[:2] + of_runs)


def test_another_machine_continues_with_a_start_of_its_own(command, tmp_path, study_file):
    """Its start differs, so that what it adds is compared with draws of bf16 from the same start."""
    command("--results", bad=("fp8",))
    code, out = command("--results", out="elsewhere")
    assert code == 0 and "Starts: 4" in out
    assert {run for run in trained(tmp_path, "elsewhere") if "-0-" in run and run[:-1] != "start-0-"} == {
        *("bf16-0-0", "bf16-0-1", "fp8-0-0", "fp8-0-1")
    }
    content = json.loads((tmp_path / "results" / "study_tried.json").read_text())
    assert len(content["runs"]) == 6 + 8 and len(content["starts"]) == 4


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


def records(start: str, **losses: list[float]) -> list[dict]:
    return [
        {"start": start, "recipe": recipe, "seed": 0, "draw": draw, "last_third": loss, "held_out_loss": loss}
        | {"tokens_per_second": 1.0, "peak_bytes": 2**30}
        for recipe, values in losses.items()
        for draw, loss in enumerate(values)
    ]


def test_a_gap_is_that_of_means_with_the_interval_of_draws():
    runs = records("a", bf16=[0.99, 1.01], fp8=[1.0197, 1.0403])
    # Deviations of ±1 % in both, with 2 degrees of freedom: variance 2 (%²); error √(2 · (1/2 + 1/2)).
    found = gap(runs, "fp8", "last_third")
    assert found.mean == pytest.approx(3.0) and found.runs == 2
    assert found.half_width == pytest.approx(4.303 * math.sqrt(2))
    single = gap(records("a", bf16=[1.0], fp8=[1.02]), "fp8", "last_third")
    assert (round(single.mean, 9), single.half_width) == (2.0, None)
    assert gap(records("a", bf16=[1.0]), "fp8", "last_third") is None
    other = gap(records("a", bf16=[1.0], fp8=[2.0, 2.0], nvfp4=[2.02]), "nvfp4", "last_third", "fp8")
    assert other.mean == pytest.approx(1.0)
    assert [quantile(degrees) for degrees in (1, 5, 30)] == pytest.approx([12.71, 2.571, 2.04], abs=0.005)


def test_growth_is_the_slope_of_a_line_over_tenfold_sizes():
    found = growth([(1e6, Gap(0.3, 0.03, 2)), (1e8, Gap(0.1, 0.04, 3))])
    assert found == pytest.approx((-0.1, 0.025, 5))
    # Gaps that are known exactly leave one that is not no say.
    assert growth([(10, Gap(1, 1e-6, 1)), (1000, Gap(3, 1e-6, 1)), (100, Gap(9, 1e6, 1))]).mean == pytest.approx(1)
    assert growth([(10, Gap(1, 0.1, 1)), (10, Gap(2, 0.1, 1)), (100, Gap(3, None, 1))]) is None


def test_starts_are_compared_one_by_one():
    """Seeds whose losses lie far apart give the gap of each, not that of all."""
    runs = records("a", bf16=[1.0, 1.0], fp8=[1.01]) + records("b", bf16=[2.0, 2.0], fp8=[2.06])
    assert gap(runs, "fp8", "held_out_loss").mean == pytest.approx(2.0)
    # A recipe without bf16 from its start says nothing.
    assert gap([*runs, *records("c", fp8=[9.0])], "fp8", "held_out_loss").mean == pytest.approx(2.0)


def test_the_spread_of_bf16_is_that_of_all_starts():
    """A start with one run of each recipe has the interval that the other starts give."""
    runs = records("a", bf16=[1.0], fp8=[1.02]) + records("b", bf16=[1.98, 2.02])
    found = gap(runs, "fp8", "last_third")
    assert found.mean == pytest.approx(2.0)
    assert found.half_width == pytest.approx(12.71 * math.sqrt(2) * math.sqrt(2))


def test_a_diverged_run_is_in_no_mean(study_file):
    lost = record_of(Run("fp8", 0, 1), "a", Result("fp8", 16, losses=[1.0, math.nan], seconds=[1.0, 1.0]), {})
    assert lost["last_third"] is lost["held_out_loss"] is lost["curve"] is None
    runs = [*records("a", bf16=[1.0, 1.0], fp8=[1.01]), lost]
    assert gap(runs, "fp8", "last_third").mean == pytest.approx(1.0)
    assert "| fp8 | 2 | +1.000 % ± 0.000 |" in table(Study.read(study_file), runs)


def test_recipes_are_compared_over_the_same_seeds(study_file):
    """A recipe that lacks a seed has gaps with the other seeds only."""
    second = [{**run, "seed": 1} for run in records("b", bf16=[1.0, 1.0], fp8=[1.02])]
    lines = table(Study.read(study_file), [*records("a", bf16=[1.0, 1.0]), *second]).splitlines()
    head, fp8 = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[-1]))
    gaps = {title: cell for title, cell in zip(head, fp8) if "above" in title}
    assert gaps.pop("training loss above bf16, seed 1").startswith("+2.000 %")
    assert len(gaps) == 3 and set(gaps.values()) == {"-"}


def test_a_record_has_the_mean_of_the_last_third_and_a_short_curve():
    losses = [float(i) for i in range(1000)]
    result = Result("fp8", 16, losses=losses, seconds=[0.5] * 1000, bf16_steps=100, held_out_loss=3.0)
    record = record_of(Run("fp8", 0, 0), "a", result, {})
    assert record["last_third"] == statistics.fmean(losses[-333:]) and record["seconds"] == 450.0
    assert len(record["curve"]) == 200 and record["curve"][0] == 2.0


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


def test_a_draw_moves_each_weight_by_one_bit():
    def weights(draw: int, recipe: str = "bf16") -> torch.Tensor:
        trainer = Trainer(recipe, TINY, torch.device("cpu"))
        perturb(trainer.model, draw)
        return torch.cat([getattr(p, "hp", p).detach().flatten() for p in trainer.model.parameters()])

    plain, first, second = (weights(draw) for draw in (0, 1, 2))
    for moved in (first, second):
        up, down = (torch.nextafter(plain, torch.full_like(plain, to)) for to in (torch.inf, -torch.inf))
        assert ((moved == up) | (moved == down)).all() and 0.49 < (moved == up).float().mean() < 0.51
    assert not torch.equal(first, second) and torch.equal(first, weights(1, "fp8"))


def test_errors_are_those_of_each_copy():
    exact = torch.eye(128) * 448
    assert error_percent(exact, "fp8_1x128", False) == error_percent(exact, "fp8_128x128", False) == 0
    x = torch.ones(128, 128)
    # Next to 2^-12 of it, an element rounds to zero: along the row that has both, and in a square, not along tokens.
    x[:, 0] = 2.0**20
    lost = 100 * math.sqrt(127 / (127 + 2.0**40))
    assert error_percent(x, "fp8_1x128", False) == pytest.approx(lost) == error_percent(x, "fp8_128x128", False)
    assert error_percent(x, "fp8_1x128", True) == 0


@MODELS
def test_errors_of_every_operand_of_a_model_are_known(config):
    """Of weights [E, N, K], too."""
    model = Trainer("bf16", config, torch.device("cpu")).model
    errors = operand_errors(model, torch.randint(256, (2, config.seq_len + 1)))
    assert set(errors) == {"x", "w", "dy"}
    assert all(0 < error["median"] <= error["max"] < 15 for copies in errors.values() for error in copies.values())
