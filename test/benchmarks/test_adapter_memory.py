"""Memory of LoRA on quantized bases: weights take what their formats say, and only the base differs between rows."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers", "5.0")

import adapter_memory

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu")


def test_rows(tmp_path):
    argv = ["--hidden", "256", "--layers", "1", "--tokens", "32", "--out", str(tmp_path)]
    adapter_memory.main(argv)
    rows = json.loads((tmp_path / "adapter_memory.json").read_text())["rows"]
    bits = {name: row["bits a base weight"] for name, row in rows.items()}
    expected = {
        "bf16": 16,
        "FP8, quantized Parameters": 8 + 32 / 128**2,
        "NVFP4, quantized Parameters": 4 + 8 / 16**2,
        # A byte for 64 weights, and a float for 256 of those.
        "NF4 of bitsandbytes": 4 + 8 / 64 + 32 / 64 / 256,
    }
    assert len(bits) >= 3 and bits == pytest.approx({name: expected[name] for name in bits}, rel=1e-3)
    assert len({row["saved for backward MiB"] for row in rows.values()}) == 1
    others = [row["peak of a step MiB"] - row["base MiB"] for row in rows.values()]
    assert others == pytest.approx([others[0]] * len(others), rel=0.01)
