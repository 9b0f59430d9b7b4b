"""Masters of quantized Parameters on ranks that differ, and where one of them fails."""

from __future__ import annotations

import pytest
from primary_weight_checks import go_wrong
from ranks import spawn

DIFFERENCES = {
    "other_shape": "ranks differ; rank 0 has up.weight (fp8_128x128, ",
    "other_format": "ranks differ; rank 0 has up.weight (fp8_128x128, ",
    "other_lr": "ranks differ; rank 0 has AdamW, shard zero1, lr=0.01, rank 1 has AdamW, shard zero1, lr=0.02",
    "other_frozen": "ranks differ; rank 0 has mid.weight (fp8_128x128, ",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ(what, tmp_path):
    for message in spawn(go_wrong, 2, tmp_path, what):
        assert message.startswith(f"ValueError: MasterWeightOptimizer: {DIFFERENCES[what]}"), message


def test_a_rank_that_does_not_come(tmp_path):
    message, other = spawn(go_wrong, 2, tmp_path, "fails")
    assert message.startswith("RuntimeError: MasterWeightOptimizer: no word from rank 1 in 5 s"), message
    assert other == "FloatingPointError: rank 1 gives up"
