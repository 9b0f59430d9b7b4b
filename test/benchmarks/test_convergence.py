"""Runs of several seeds: started one by one, kept, merged, compared with bf16 of the same seed."""

from __future__ import annotations

import json
import shutil

import convergence
import pytest

# What stands for train_llm.py: it writes what a run of one recipe writes, and fails for seed 7.
STAND_IN = """
import json, pathlib, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
recipe, seed = args["--recipes"], int(args["--seed"])
if seed == 7:
    sys.exit("no such luck")
loss = {loss}[recipe] + seed
row = {{"recipe": recipe, "layers": "all", "held_out_loss": loss, "tokens_per_second": 10.0 + seed, "peak_bytes": None}}
config = {{"preset": args.get("--preset", "tiny"), "steps": 8, "batch_size": 2, "grad_accumulation": 1, "seq_len": 4,
           "parameters": 1000, "seed": seed}}
if "--bf16-steps" in args:
    config["bf16_steps"] = int(args["--bf16-steps"])
content = {{"config": config, "data": {{"name": "text", "sha256_16": "ab", "passes": 0.5}},
            "environment": {{"device": "a CPU", "commit": args.get("--commit", "c0"),
                             "command": " ".join(sys.argv[1:])}}, "table": [row],
            "curves": {{recipe: {{"loss": [loss + 1 / (i + 1) for i in range(8)], "seconds": [1.0] * 8}}}}}}
pathlib.Path(args["--out"], "train_llm.json").write_text(json.dumps(content))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.format(loss='{"bf16": 2.0, "fp8": 2.02, "nvfp4": None}'))
    monkeypatch.setattr(convergence, "_TRAIN", stand_in)
    monkeypatch.setattr(convergence.torch.cuda, "device_count", lambda: 0)

    def called(*args: str) -> tuple[int, str]:
        code = convergence.main(["--out", str(tmp_path / "out"), *args])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    called.out = tmp_path / "out"
    return called


def test_gaps_are_those_to_bf16_of_the_same_seed(run):
    code, out = run("--recipes", "bf16", "fp8", "--seeds", "0", "2")
    assert code == 0
    # 2.02 / 2 and 4.02 / 4.
    assert "| fp8 | 0, 2 | 3.0200 | +0.75 % | +0.50, +1.00 % | 11 | - |" in out
    assert "| bf16 | 0, 2 | 3.0000 | - | - |" in out
    written = json.loads((run.out / "convergence_tiny_cpu.json").read_text())
    assert [row["recipe"] for row in written["table"]] == ["bf16", "fp8"] and written["missing"] == []
    assert len(written["runs"]["fp8, seed 2"]["loss"]) == 8
    assert written["environment"]["command"] == "--recipes bf16 fp8 --seeds 0 2"
    assert (run.out / "convergence_tiny_cpu.md").read_text() in out


def test_what_is_finished_is_kept_and_what_fails_is_named(run):
    code, out = run("--recipes", "bf16", "fp8", "--seeds", "0", "7")
    assert code == 1 and "Not there: bf16, seed 7; fp8, seed 7." in out
    assert "bf16, seed 7: ended with code 1, see" in out
    assert "no such luck" in (run.out / "fp8_seed_7" / "log.txt").read_text()
    before = (run.out / "fp8_seed_0" / "train_llm.json").stat().st_mtime_ns
    code, out = run("--recipes", "bf16", "fp8", "--seeds", "0", "1")
    assert code == 0 and "| fp8 | 0, 1 |" in out and "fp8, seed 0: done" not in out
    assert (run.out / "fp8_seed_0" / "train_llm.json").stat().st_mtime_ns == before


def test_a_run_without_bf16_of_its_seed_is_named_and_no_part_of_the_mean(run):
    code, out = run("--recipes", "fp8", "--seeds", "1")
    assert code == 0 and "| fp8 | 1 | 3.0200 | - |" in out and "Not in the table" not in out
    run("--recipes", "bf16", "--seeds", "0")
    code, out = run("--recipes", "fp8", "--seeds", "0")
    assert code == 0 and "| fp8 | 0 | 2.0200 | +1.00 % |" in out
    assert "Not in the table, as there is no bf16 of the same seed: fp8, seed 1: 3.0200." in out
    written = json.loads((run.out / "convergence_tiny_cpu.json").read_text())
    assert len(written["runs"]) == 3


def test_folders_are_merged_and_others_refused(run, tmp_path):
    run("--recipes", "bf16", "--seeds", "0", "1")
    other = tmp_path / "other"
    convergence.main(["--out", str(other), "--recipes", "fp8", "--seeds", "0", "1"])
    code, out = run("--merge", str(other))
    assert code == 0 and "| fp8 | 0, 1 |" in out
    strange = tmp_path / "strange"
    convergence.main(["--out", str(strange), "--recipes", "fp8", "--seeds", "3", "--preset", "cpu"])
    code, out = run("--merge", str(strange))
    assert code == 2 and "runs of different models, data or machines cannot be compared" in out
    code, out = run("--merge", str(other), "--steps", "3")
    assert code == 2 and "--merge trains nothing, got --steps 3" in out


def test_every_run_has_its_commit(run, tmp_path):
    run("--recipes", "bf16", "--seeds", "0")
    other = tmp_path / "other"
    convergence.main(["--out", str(other), "--recipes", "fp8", "--seeds", "0", "--commit", "c1"])
    result = run.out / "convergence_tiny_cpu.json"
    for place in (other, result):
        # The second time from what was written the first time, none of whose folders are there.
        code, _ = run("--merge", str(place))
        written = json.loads(result.read_text())
        assert code == 0 and written["environment"]["commit"] == "c0, c1"
        assert {name: row["commit"] for name, row in written["runs"].items()} == {
            "bf16, seed 0": "c0", "fp8, seed 0": "c1",
        }  # fmt: skip
        for folder in run.out.glob("*_seed_*"):
            shutil.rmtree(folder)


def test_runs_of_a_seed_begin_together(run, monkeypatch):
    """The first one leaves the start; only then do the others begin, wherever there is a GPU."""
    seen, real = [], convergence.subprocess.run

    def started(command, **options):
        if "--bf16-steps" in command:
            assert command[command.index("--starts") + 1] == str(run.out)
        seen.append((command[3], command[5]))
        return real(command, **options)

    monkeypatch.setattr(convergence.subprocess, "run", started)
    code, out = run("--recipes", "bf16", "fp8", "--seeds", "0", "1", "--bf16-steps", "3")
    assert "The first 3 steps are in bf16, and the same for all recipes of a seed." in out
    assert code == 0 and sorted(seen[:2]) == [("bf16", "0"), ("bf16", "1")] and len(seen) == 4
    written = json.loads((run.out / "convergence_tiny_after_3_cpu.json").read_text())
    assert written["environment"]["command"] == "--recipes bf16 fp8 --seeds 0 1 --bf16-steps 3"
    others = run.out.parent / "others"
    convergence.main(["--out", str(others), "--recipes", "bf16", "--seeds", "2"])
    code, out = run("--merge", str(others))
    assert code == 2 and "runs of different models, data or machines cannot be compared" in out
