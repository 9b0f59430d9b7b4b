"""Memory with and without `fuse`: layers that share an input save its copy once."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", "5.0")

import fuse_memory

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu")
# {model: (fused modules of two blocks, copies that are not saved, width of the input)}
MODELS = {
    "transformers Qwen3": (4, 2 * (2 + 1), 4096),
    "torchtitan qwen3 debugmodel_non_fused_qkv": (4, 2 * (2 + 1), 256),
    "torchtitan llama3 8B": (2, 2, 4096),
}


@pytest.mark.parametrize("model", MODELS)
def test_rows(model, tmp_path):
    """An FP8 copy takes a byte an element and a scale of 4 bytes for 128."""
    if "torchtitan" in model:
        pytest.importorskip("torchtitan.models.common.linear")
    fuse_memory.main(["--tokens", "128", "--only", model, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "fuse_memory.json").read_text())["rows"]
    fused, copies, width = MODELS[model]
    assert [(row["recipe"], row["fused modules"]) for row in rows] == [("FP8", fused), ("NVFP4", fused)]
    assert all(row["with `fuse`"] < row["saved MiB"] and row["peak, ×"] <= 1 for row in rows)
    assert (rows[0]["saved MiB"] - rows[0]["with `fuse`"]) * 2**20 == copies * 128 * width * 33 // 32
