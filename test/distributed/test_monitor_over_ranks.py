"""The numerics monitor on two and four ranks: the figures of one process, however tensors are split."""

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
    ("fsdp_of_layers", "fp8"),
    ("fsdp_of_layers", "nvfp4"),
    ("fsdp_of_layers", None),
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
# Cases of four ranks.
CASES += [("fsdp_and_tensor_parallel", recipe) for recipe in ("fp8", "nvfp4", None)]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What each rank raised: of two ranks, then of four."""
    left: list[dict] = [{}, {}, {}, {}]
    for ranks in (2, 4):
        cases = [case for case in selected_cases(request) if ranks_of(case) == ranks]
        folder = tmp_path_factory.mktemp(f"monitor_{ranks}")
        for results, of_rank in zip(left, spawn_cases(run_cases, ranks, folder, cases, ranks_of, lambda case: False)):
            results.update(of_rank)
    return left


def ranks_of(case) -> int:
    return 4 if case[0] == "fsdp_and_tensor_parallel" else 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_figures_are_those_of_one_process(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: ranks_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
