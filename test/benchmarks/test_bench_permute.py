"""bench_permute.py on a tiny shape on the CPU: what it checks, measures and leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import bench_permute
import pytest
import torch
from bench_permute import OPERATIONS, SMOKE

from torchao_blockwise import ops
from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu")
SHAPE = SMOKE["smoke"]
CPU = torch.device("cpu")


def run(folder: Path, *argv: str) -> tuple[int, dict]:
    status = bench_permute.main(["--smoke", "--out", str(folder), *argv])
    return status, json.loads(next(folder.glob("permute_*.json")).read_text())


def test_a_row_for_each_operation(tmp_path):
    status, content = run(tmp_path)
    assert status == 0 and [row["operation"] for row in content["rows"]] == list(OPERATIONS)
    token = 2 * SHAPE.tokens * SHAPE.dim
    for row, tensors in zip(content["rows"], (3, 3, 5)):
        # A token's row counts once, and its two assignments' twice.
        assert row["MiB"] == pytest.approx(tensors * token / 2**20)
        assert row["TB/s"] == pytest.approx(tensors * token / row["us"] / 1e6)
        assert row["roofline us"] == pytest.approx(tensors * token / content["ceilings"]["copy"] / 1e6)
        assert row["x eager"] > 0
    assert list(tmp_path.glob("permute_*.md")) and list(tmp_path.glob("permute_*.png"))


def test_what_eager_pytorch_computes_is_the_same():
    for operation in OPERATIONS:
        job = bench_permute.job(operation, SHAPE, CPU)
        arguments = job.make()
        got, expected = job.eager(*arguments), job.run(*arguments)
        pairs = [(got, expected)] if operation == "unpermute" else zip(got, expected)
        for a, b in pairs:
            assert relative_error(a.flatten(), b.flatten()) < 5e-3, operation


def test_wrong_results_are_not_timed(tmp_path, monkeypatch):
    original = ops.unpermute

    def wrong(y, *args, backend=None, **kwargs):
        return original(y if backend else y * 1.01, *args, backend=backend, **kwargs)

    monkeypatch.setattr(ops, "unpermute", wrong)
    status, content = run(tmp_path, "--only", "unpermute")
    assert status == 1 and content["rows"] == []
    assert "differ" in content["left out"][0]["why"]
