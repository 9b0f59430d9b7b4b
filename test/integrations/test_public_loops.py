"""Loops with the structure of nanochat's and litgpt's: converted, their losses are within the noise of plain runs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("lightning", "2.4")

import public_loop_checks
from helpers import selected_cases
from ranks import spawn

pytestmark = pytest.mark.slow
CASES = [
    ("nanochat", "stacked", "own_head"),
    ("nanochat", "torch", "tied"),
    ("litgpt", "ddp"),
    ("litgpt", "fsdp"),
    ("litgpt_resumes", "ddp", "nvfp4"),
    ("litgpt_resumes", "fsdp", "fp8"),
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(public_loop_checks.run, 2, tmp_path_factory.mktemp("loops"), selected_cases(request))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses(case, raised):
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]
