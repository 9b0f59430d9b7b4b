"""The benchmark of sharded training on two processes of a CPU: bytes as counted, and what becomes of failures."""

import json

import bench_fsdp
import pytest
import torch
import torch.distributed as dist
from common.report import Report
from torch import nn

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch has no torch.distributed"),
    pytest.mark.usefixtures("without_gpu"),
]
# Bytes of an element of a linear layer's weight on its way.
WIDTHS = {"bf16": 2, "fp8": 1, "nvfp4": 0.5, "torchao_bf16_gather": 2, "torchao_fp8_gather": 1}


def bytes_of_a_step(config, width: float) -> int:
    """Both passes gather each block: linear layers as the recipe has them, norms in bf16, nothing else."""
    with torch.device("meta"):
        block = bench_fsdp.Stack(config).layers[0]
    linear = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
    others = sum(p.numel() for p in block.parameters()) - linear
    return 2 * config.layers * int(linear * width + others * 2)


def result(us: float, losses: list[float], gathered: int) -> list[dict]:
    rank = {"gathered bytes": gathered, "us": us, "tokens": 64, "peak": None, "sync us": None, "reduce us": None}
    return [rank | {"losses": losses}] * 2


def test_a_recipe_that_learns_something_else_is_called_wrong():
    results = Report("fsdp", torch.device("cpu"), bench_fsdp.COLUMNS, {})
    for recipe, last, gathered in (("bf16", 1.0, 2**20), ("fp8", 1.05, 2**19), ("nvfp4", 1.5, 2**18)):
        bench_fsdp.add_row(recipe, "eager", result(10.0, [2.0, last], gathered), results)
    assert [row.get("of bf16") for row in results.rows] == [1, 0.5, 0.25]
    assert [row.get("off") for row in results.rows] == pytest.approx([0, 0.05, 0.5])
    assert results.notes() == ["- nvfp4: WRONG, its loss is off by 0.5 of what bf16 learned (eager)"]


@pytest.mark.slow
def test_gathered_bytes_are_counted_and_a_failing_recipe_kills_nothing(tmp_path, monkeypatch, capfd):
    # AUTO takes the reference in the ranks: the same bits, many times faster than the interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench_fsdp, "RECIPES", (*bench_fsdp.RECIPES, "no_such"))
    argv = "--smoke --only no_such bf16 torchao_fp8_gather fp8 nvfp4"
    assert bench_fsdp.main([*argv.split(), "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "fsdp_cpu.json").read_text())
    table = (tmp_path / "fsdp_cpu.md").read_text()

    rows = {row["recipe"]: row for row in content["rows"]}
    assert list(rows) == ["bf16", "torchao_fp8_gather", "fp8", "nvfp4"]
    # No WRONG among them: every recipe learned what bf16 did, within its budget.
    (failed,) = content["left out"]
    assert failed["what"] == "no_such" and "KeyError" in failed["why"]
    assert "no_such" in table and content["arguments"]["ranks"] == 2

    for name, row in rows.items():
        expected = bytes_of_a_step(bench_fsdp.SMOKE, WIDTHS[name])
        assert [rank["gathered bytes"] for rank in row["ranks"]] == [expected] * 2
        assert row["gathered MiB"] == expected / 2**20
        assert row["us"] == max(rank["us"] for rank in row["ranks"])
        assert row["tokens/s"] == pytest.approx(2 * 2 * bench_fsdp.SMOKE.seq_len / row["us"] * 1e6)
        assert row["losses"][-1] < row["losses"][0]
    assert rows["fp8"]["of bf16"] <= 0.51 and rows["nvfp4"]["of bf16"] <= 0.26
    for name in ("fp8", "nvfp4"):
        assert 0 < rows[name]["reduce ms"] < rows[name]["sync ms"]
        assert rows[name]["sync ms"] < rows[name]["ms a step"]
        # One sync and one all-reduce a step, or the times would be of something else.
        assert rows[name]["ranks"][0]["syncs"] == rows[name]["ranks"][0]["reduces"] == 1
    assert rows["torchao_fp8_gather"]["sync ms"] > 0 and rows["torchao_fp8_gather"]["reduce ms"] is None
    assert rows["bf16"]["sync ms"] is None and rows["bf16"]["off"] == 0
