"""Trainer and accelerate over two ranks, by DDP and by FSDP2: every weight trains, and resumes bit for bit."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("accelerate", "1.6")
pytest.importorskip("transformers", "5.0")

import trainer_checks
from helpers import selected_cases
from ranks import spawn

CASES = [("resumes", "ddp", "nvfp4"), ("resumes", "fsdp", "fp8"), ("resumes", "fsdp_shards", "fp8")]
CASES += [("example_resumes", "fsdp")]

SLOW = [("resumes", "ddp", "fp8"), ("resumes", "fsdp", "nvfp4"), ("example_resumes", "ddp")]
SLOW += [("compiled", recipe) for recipe in ("fp8", "nvfp4")]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(trainer_checks.run, 2, tmp_path_factory.mktemp("trainer"), selected_cases(request))


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join)
def test_training(case, raised):
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]
