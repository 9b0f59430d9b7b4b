"""bench_torchtitan: its options, the row that the trainer's logs make, and the table of all recipes.

test/integrations/test_torchtitan_0_2.py lets it train.
"""

from __future__ import annotations

import json

import bench_torchtitan as bench
import pytest


def log(tps: float, loss: float, gib: float = 1.0) -> dict:
    memory, losses = {"memory/max_reserved(GiB)": gib}, {"loss_metrics/global_avg_loss": loss}
    return {"throughput(tps)": tps, "mfu(%)": tps / 10, **memory, **losses}


def test_a_row_leaves_out_the_logs_of_compiling():
    logs = [log(1, 9.0, 5.0), log(2, 8.0), log(100, 7.0), log(120, 6.0), log(90, 5.0)]
    row = bench.figures(logs)
    assert row == {"tokens/s": 100, "MFU %": 10, "peak GiB": 5.0, "first loss": 9.0, "last loss": 5.0}
    with pytest.raises(ValueError, match="2 logs, and 2 are for compiling; take more --steps"):
        bench.figures(logs[:2])


def test_options_behind_two_dashes_are_torchtitans():
    args = bench.parse(["--layers", "2", "--", "--activation_checkpoint.mode", "selective"])
    assert args.layers == 2 and args.more == ["--activation_checkpoint.mode", "selective"]
    assert args.recipes == ["bf16", "fp8", "torchao_rowwise"] and args.model == "llama"


@pytest.mark.parametrize("argv", (["--layers", "0"], ["--steps", "2"], ["--gpus", "0"]), ids="-".join)
def test_bad_options(argv, capsys):
    with pytest.raises(SystemExit):
        bench.parse(argv)
    assert "takes 1 layer, 3 steps and 1 GPU or more" in capsys.readouterr().err


def test_what_is_missing_is_said(without_gpu, capsys):
    assert bench.main([]) == 2
    assert capsys.readouterr().err.startswith("bench_torchtitan: ")


def test_the_table(without_gpu, monkeypatch, tmp_path):
    """A recipe that fails is left out with its reason, and the others go on."""

    def measure(args, recipe):
        if recipe == "nvfp4":
            raise RuntimeError("torchtitan ended with 1; its log is above")
        logs = [log(100 if recipe == "bf16" else 150, 9.0 - i) for i in range(4)]
        return {**bench.figures(logs), "losses": [9.0, 8.0]}

    monkeypatch.setattr(bench, "missing", lambda: None)
    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main(["--recipes", "bf16", "fp8", "nvfp4", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "torchtitan_llama_4_layers_cpu.json").read_text(encoding="utf-8"))
    assert [(row["recipe"], row["x bf16"]) for row in written["rows"]] == [("bf16", 1.0), ("fp8", 1.5)]
    assert written["rows"][0]["losses"] == [9.0, 8.0]
    assert written["left out"][0]["what"] == "nvfp4" and "ended with 1" in written["left out"][0]["why"]


def test_a_process_that_fails_says_so(monkeypatch, without_gpu, capfd):
    """The process that runs a recipe is the script itself, which finds no GPU here."""
    with pytest.raises(RuntimeError, match="torchtitan ended with 2; its log is above"):
        bench.measure(bench.parse(["--smoke"]), "fp8")
    assert "bench_torchtitan: " in capfd.readouterr().err
