"""The numerics monitor on two ranks: the figures of one process, however tensors are split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from monitor_run import run_cases
from ranks import spawn_cases

CASES = [
    ("fsdp", "fp8"),
    ("fsdp", "nvfp4"),
    ("ddp", "fp8"),
    ("ddp", "nvfp4"),
    ("tensor_parallel", "fp8"),
    ("tensor_parallel", "nvfp4"),
    ("tensor_parallel", None),
    ("expert_parallel", "fp8"),
    ("expert_parallel", "nvfp4"),
    ("pipeline",),
    ("nonfinite",),
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("monitor")
    return spawn_cases(run_cases, 2, folder, selected_cases(request), lambda case: 2, lambda case: False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_figures_are_those_of_one_process(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
