"""The command benchmarks/train_llm.py: clear refusals, a full report."""

import json
from dataclasses import replace

import pytest
import torch
import train_llm
from llm_cases import CPU, TEXT, TINY
from llm_training import throughput
from llm_training.config import UsageError
from llm_training.data import Corpus
from llm_training.recipes import DEFAULT, SEPARATE
from llm_training.training import Trainer

pytestmark = pytest.mark.usefixtures("train_llm_alike")


def refusal(capsys, *argv: object) -> str:
    assert train_llm.main([str(a) for a in ("--device", "cpu", "--preset", "tiny", *argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_llm: ")
    return line


@pytest.mark.parametrize(
    ("argv", "messages"),
    (
        ("--data {folder}/nothing", ["no such file or folder"]),
        ("--data {folder}/empty.txt", ["need at least 130 bytes", "got 0"]),
        ("--data {folder}/short.txt", ["need at least 130 bytes", "got 100"]),
        ("--warmup 8 --steps 8", ["warmup must be"]),
        ("--steps 0", ["steps must be at least 1, got 0"]),
        ("--lr nan", ["lr must be above 0"]),
    ),
)
def test_what_cannot_run_is_refused(argv, messages, capsys, text_file, tmp_path):
    for name, size in (("empty", 0), ("short", 100)):
        (tmp_path / f"{name}.txt").write_bytes(b"x" * size)
    message = refusal(capsys, "--out", tmp_path / "new", *argv.format(folder=tmp_path).split())
    assert all(part in message for part in messages)


def test_a_checkpoint_of_another_configuration_names_the_fields(tmp_path):
    path, corpora = tmp_path / "x.pt", [Corpus.from_bytes(text, "text", 64, 4) for text in (TEXT, TEXT[1:])]
    Trainer("bf16", TINY, CPU).save(path, corpora[0])
    with pytest.raises(UsageError) as raised:
        Trainer("bf16", replace(TINY, steps=6, lr=0.5), CPU).load(path, corpora[1])
    for part in ("steps: 8 -> 6", "lr: 0.002 -> 0.5", "data (sha256)"):
        assert part in str(raised.value)


def test_the_command_leaves_table_json_and_picture(text_file, tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(train_llm, "RESULTS", results)
    out = tmp_path / "out"
    argv = ["--device", "cpu", "--preset", "tiny", "--data", str(text_file), "--out", str(out), "--results"]
    assert train_llm.main(argv) == 0
    printed = capsys.readouterr().out
    assert "0.4 M parameters" in printed and "8 steps of 128 tokens" in printed

    content = json.loads((out / "train_llm_tiny_cpu.json").read_text())
    config = content["arguments"]
    assert config["dim"] == TINY.dim and config["seed"] == 0 and config["products"] == "bf16"
    assert content["environment"]["torch"] == torch.__version__
    device, data = content["environment"]["device"], config["data"]
    assert device and f"{device}. 1,024 tokens from 0.0 MB of text ({text_file}), each byte once." in printed
    assert data["passes"] == 8 * 128 / data["train_bytes"]
    assert [row["recipe"] for row in content["rows"]] == list(DEFAULT)
    for row in content["rows"]:
        assert row["tokens/s"] > 0 and row["peak memory"] is row["peak_bytes"] is None
        assert len(row["losses"]) == len(row["seconds"]) == TINY.steps
        assert row["held-out loss"] == f"{row['held_out_loss']:.4f}" and f"| {row['held-out loss']} |" in printed
    bf16, fp8, _ = content["rows"]
    assert fp8["gap to bf16"] == f"{100 * (fp8['held_out_loss'] / bf16['held_out_loss'] - 1):+.2f} %"
    assert bf16["gap to bf16"] is None
    assert (out / "train_llm_tiny_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in results.iterdir()} == {f"train_llm_tiny_cpu.{suffix}" for suffix in ("json", "md", "png")}


THROUGHPUT = {
    "--fuse": (SEPARATE, "throughput_tiny_fuse_cpu"),
    "--compile": (("bf16", "fp8", "fp8_fused_once", "nvfp4"), "throughput_tiny_compiled_cpu"),
    "--recipes fp8 bf16 --profile": (("bf16", "fp8"), "throughput_tiny_cpu"),
}


@pytest.mark.parametrize("argv", THROUGHPUT)
def test_recipes_take_turns(argv, text_file, tmp_path, monkeypatch):
    turns, (recipes, name) = [], THROUGHPUT[argv]

    def turn(self, steps, original=throughput.Run.turn):
        turns.append((id(self), steps))
        original(self, steps)

    monkeypatch.setattr(throughput.Run, "turn", turn)
    common = ("--device", "cpu", "--preset", "tiny", "--data", str(text_file), "--out", str(tmp_path))
    assert train_llm.main([*common, "--throughput", "--steps", "10", *argv.split()]) == 0
    once = turns[: len(recipes)]
    assert turns == 2 * once and len({number for number, _ in once}) == len(recipes) and {n for _, n in once} == {5}
    content = json.loads((tmp_path / f"{name}.json").read_text())
    rows, text = content["rows"], (tmp_path / f"{name}.md").read_text()
    assert tuple(row["recipe"] for row in rows) == recipes and content["left out"] == []
    for row in rows:
        assert row["tokens/s"] == pytest.approx(TINY.tokens_per_step / row["us"] * 1e6)
        assert row["timing"]["repeats"] == 2 and row["host ms"] > 0 and row["peak GiB"] is None
        assert ("products ms" in row) == (f"### {row['recipe']}: " in text) == ("--profile" in argv)
    assert rows[1]["x bf16"] == pytest.approx(rows[0]["us"] / rows[1]["us"])
