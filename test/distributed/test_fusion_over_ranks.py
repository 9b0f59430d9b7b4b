"""Fused modules under FSDP2 and tensor parallelism: the bits of modules that are not fused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("transformers")

from fusion_run import run_cases
from ranks import spawn_cases

# (what is run, recipe, and whether it is fused before or after `quantize_`, modules inside layers too, mixed precision)
CASES = [
    ("shards", "fp8", "after", False, False),
    ("shards", "fp8", "before", True, True),
    ("shards", "nvfp4", "after", True, False),
    ("shards", "nvfp4", "before", False, True),
    ("compiles", "fp8"),
    ("splits", "fp8", "after"),
    ("splits", "nvfp4", "before"),
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("fusion")
    return spawn_cases(run_cases, 2, folder, selected_cases(request), lambda case: 2, lambda case: False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bits_are_those_of_before(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
