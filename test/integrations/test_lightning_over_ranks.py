"""Lightning by ModelParallelStrategy, which is FSDP2, on two ranks: the bits of steps by hand, and it resumes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("lightning", "2.4")

import lightning_checks
from helpers import selected_cases
from ranks import spawn

CASES = [("resumes", "fp8", "shards"), ("resumes", "nvfp4", "one_file"), ("needs_conversion_before_shards",)]
SLOW = [("resumes", "fp8", "one_file"), ("resumes", "nvfp4", "shards")]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(lightning_checks.run, 2, tmp_path_factory.mktemp("lightning"), selected_cases(request))


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join)
def test_training(case, raised):
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]
