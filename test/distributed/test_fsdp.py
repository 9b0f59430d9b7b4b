"""FSDP2 with master weights: quantized gathers with the bits of one device, and training like the unsharded model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from fsdp_run import cases, may_run_on_gpus, run_checks, size_of
from ranks import spawn_cases

RANKS = 4
CASES = cases()


def case_id(case) -> str:
    name, size, config = case
    return f"{name.split('.')[-1]}-{size if isinstance(size, int) else 'x'.join(map(str, size))}-{config}"


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What each rank raised in each selected case: all run in one set of processes."""
    folder = tmp_path_factory.mktemp("fsdp")
    return spawn_cases(run_checks, RANKS, folder, selected_cases(request), size_of, may_run_on_gpus)


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_fsdp(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
