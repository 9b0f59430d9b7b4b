"""Primary weights on several ranks: DDP and ZeRO-1 train as high-precision parameters do, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from primary_weight_checks import CASES, go_wrong, run_cases
from ranks import spawn, spawn_cases

RANKS = 4


def size_of(case: str) -> int:
    return CASES[case][1] or RANKS


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What each rank raised in each selected case: all run in one set of processes."""
    folder = tmp_path_factory.mktemp("primary_weights")
    return spawn_cases(run_cases, RANKS, folder, selected_cases(request), size_of)


@pytest.mark.parametrize("case", CASES)
def test_ranks(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)


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
