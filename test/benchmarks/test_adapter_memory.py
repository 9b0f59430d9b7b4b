"""Memory of LoRA on quantized bases: the table follows arithmetic, and is the one that was written."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers", "5.0")

import adapter_memory

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu")
NF4 = "NF4 of bitsandbytes"


def test_rows():
    """At rest a weight takes what its format says; the base alone differs between a step of one and of another."""
    rows = adapter_memory.rows_of(hidden=256, layers=1, tokens=32)
    bits = {name: row["bits a base weight"] for name, row in rows.items()}
    assert bits["bf16"] == 16
    assert bits["FP8, quantized Parameters"] == pytest.approx(8 + 32 / 128**2, rel=1e-3)
    assert bits["NVFP4, quantized Parameters"] == pytest.approx(4 + 8 / 16**2, rel=1e-3)
    # A byte for 64 weights, and a float for 256 of those.
    assert bits.get(NF4, 4 + 8 / 64 + 32 / 64 / 256) == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, rel=1e-3)
    saved = {row["saved for backward MiB"] for row in rows.values()}
    assert len(saved) == 1


def test_the_table_is_that_of_the_results():
    written = json.loads((adapter_memory.RESULTS / "adapter_memory.json").read_text(encoding="utf-8"))
    table = (adapter_memory.RESULTS / "adapter_memory.md").read_text(encoding="utf-8")
    assert table == adapter_memory.table(written["rows"]) + "\n" and NF4 in written["rows"]
