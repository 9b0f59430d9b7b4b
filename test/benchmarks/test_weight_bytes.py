"""Bytes a parameter: the table is read off tensors, agrees with arithmetic, and is the one that was written."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
import weight_bytes

needs_dist = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
pytestmark = [pytest.mark.usefixtures("no_interpreter"), needs_dist]
FP8, NVFP4, MASTER, STATES = 1 + 4 / 128**2, 0.5 + 1 / 16**2, 4, 8


def test_rows():
    rows = weight_bytes.rows_of(features=256, ranks=4)
    totals = [held["total"] for held in rows.values()]
    expected = [6, 2 + MASTER + STATES] + 2 * [MASTER + STATES] + [FP8 + MASTER + STATES, NVFP4 + MASTER + STATES]
    expected += [FP8 + (MASTER + STATES) / 4, NVFP4 + (MASTER + STATES) / 4]
    # FSDP2 splits the payload; every rank has every scale.
    expected += [(1 + MASTER + STATES) / 4 + FP8 - 1, (0.5 + MASTER + STATES) / 4 + NVFP4 - 0.5]
    assert totals == pytest.approx(expected, abs=1e-3)
    assert all(held["total"] == pytest.approx(sum(list(held.values())[:3])) for held in rows.values())
    assert not dist.is_initialized()


def test_the_table_is_that_of_the_results():
    written = json.loads((weight_bytes.RESULTS / "weight_bytes.json").read_text(encoding="utf-8"))
    table = (weight_bytes.RESULTS / "weight_bytes.md").read_text(encoding="utf-8")
    assert table == weight_bytes.table(written["rows"]) + "\n"
