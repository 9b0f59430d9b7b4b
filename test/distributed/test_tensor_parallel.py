"""Tensor parallelism by `parallelize_module`: low-precision products on shards, with the unsharded layer's bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ranks import spawn
from tensor_parallel_run import CASES, RANKS, ranks_of, run_checks


def case_id(case) -> str:
    name, size, config = case
    return f"{name}-{size if isinstance(size, int) else 'x'.join(map(str, size))}-{config}"


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict | None]:
    """What each rank raised in each selected case: all run in one set of processes."""
    chosen = selected_cases(request)
    return spawn(run_checks, RANKS, tmp_path_factory.mktemp("tensor_parallel"), chosen)


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_tensor_parallel(case, raised):
    results = [(of_rank or {}).get(case, "not reached") for of_rank in raised[: ranks_of(case[1])]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
