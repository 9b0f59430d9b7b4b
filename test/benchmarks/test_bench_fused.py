"""bench_fused.py on tiny shapes on the CPU: what it checks, measures and leaves out."""

from __future__ import annotations

import json

import bench_fused
import pytest
import torch

from torchao_blockwise import ops

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")
CPU = torch.device("cpu")


def test_fused(tmp_path):
    assert bench_fused.main(["--smoke", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"fused_cpu.json", "fused_cpu.md", "fused_cpu.png"}
    content = json.loads((tmp_path / "fused_cpu.json").read_text())
    assert [(row["case"], row["shape"]) for row in content["rows"]] == [
        (case, shape)
        for case in bench_fused.CASES
        for shape in (("48x256", "33x64") if "swiglu" in case else ("48x384", "33x128"))
    ]
    assert content["left out"] == []
    for row in content["rows"]:
        assert row["roofline us"] == pytest.approx(row["MiB"] * 2**20 / content["ceilings"]["copy"] / 1e6)
        assert row["TB/s"] == pytest.approx(row["MiB"] * 2**20 / row["us"] / 1e6)
        for name in bench_fused.PEERS:
            assert row[f"x {name}"] == pytest.approx(row["peers us"][name] / row["us"])


@pytest.mark.parametrize("case", ("rms_both", "layer_rowwise", "swiglu_both", "swiglu_backward_both"))
def test_wrong_bits_of_fused_operations_are_not_timed(case, tmp_path, monkeypatch):
    name = {"rms": "norm_quantize", "layer": "norm_quantize"}.get(case.split("_")[0]) or (
        "swiglu_backward_quantize" if "backward" in case else "swiglu_quantize"
    )
    original = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda x, *args, **options: original(x * 1.01, *args, **options))
    assert bench_fused.main(["--smoke", "--out", str(tmp_path), "--only", case]) == 1
    content = json.loads((tmp_path / "fused_cpu.json").read_text())
    assert content["rows"] == [] and "bits differ" in content["left out"][0]["why"]


def test_wrong_statistics_are_not_timed(tmp_path, monkeypatch):
    original = ops.norm_statistics

    def wrong(x, kind, eps, *, backend=None):
        return original(x, kind, eps if backend else eps + 0.1, backend=backend)

    monkeypatch.setattr(ops, "norm_statistics", wrong)
    assert bench_fused.main(["--smoke", "--out", str(tmp_path), "--only", "rms_rowwise"]) == 1
    content = json.loads((tmp_path / "fused_cpu.json").read_text())
    assert "statistics differ" in content["left out"][0]["why"]


def tensors(x):
    """The tensors in nested tuples, which hold names too."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for item in x for t in tensors(item)] if isinstance(x, tuple) else []


@pytest.mark.parametrize("case", bench_fused.CASES)
def test_bytes_that_must_move_through_a_fused_operation(case):
    job = bench_fused.Job(case, 224, 320, CPU)
    arguments = job.make()
    read, (_, copies) = sum(t.nbytes for t in arguments if t is not None and t.dim() == 2), job.run(*arguments)
    # A norm reads its input once more.
    read *= 2 if job.case.norm else 1
    assert job.nbytes == read + sum(t.nbytes for t in tensors(copies))


def test_a_peer_that_fails_or_is_wrong_kills_nothing(tmp_path, monkeypatch):
    def fail(self, *arguments):
        raise RuntimeError("no luck today")

    monkeypatch.setattr(bench_fused.Job, "run_torch", fail)
    monkeypatch.setattr(bench_fused.Job, "run_two_steps", lambda self, x, *rest: self.run(2 * x, *rest)[1])
    assert bench_fused.main(["--smoke", "--out", str(tmp_path), "--only", "swiglu_both"]) == 0
    content = json.loads((tmp_path / "fused_cpu.json").read_text())
    assert len(content["rows"]) == 2 and {str(row["peers us"]) for row in content["rows"]} == {"{}"}
    whys = {entry["what"]: entry["why"] for entry in content["left out"]}
    assert whys["torch"] == "RuntimeError: no luck today" and whys["two steps"].startswith("WRONG, relative error")


def test_without_a_gpu_or_with_an_unknown_peer_it_says_so(capsys):
    with pytest.raises(SystemExit):
        bench_fused.main([])
    assert "needs a CUDA GPU; none found" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_fused.main(["--smoke", "--peers", "jax"])
    assert "no peer jax; the peers are torch, two steps" in capsys.readouterr().err
