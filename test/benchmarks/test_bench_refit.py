"""The benchmark of weights for inference engines, on two processes of a CPU."""

from __future__ import annotations

import json

import bench_refit
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch has no torch.distributed"),
    pytest.mark.usefixtures("without_gpu"),
]


def test_quantized_weights_are_half_the_bytes(tmp_path, monkeypatch):
    # AUTO takes the reference in the ranks: the same bits, many times faster than the interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("safetensors")
    assert bench_refit.main(["--smoke", "--repeats", "2", "--out", str(tmp_path)]) == 0
    rows = {row["way"]: row for row in json.loads((tmp_path / "refit_cpu.json").read_text())["rows"]}
    assert list(rows) == list(bench_refit.WAYS)
    assert rows["bf16"]["of bf16"] == rows["bf16"]["x bf16"] == 1
    for way in ("bf16, quantized", "quantized"):
        assert 0.5 < rows[way]["of bf16"] < 0.51 and rows[way]["ms"] > 0
