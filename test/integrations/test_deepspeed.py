"""DeepSpeed's ZeRO on two ranks: bitwise identical to plain data parallelism, and it resumes."""

from __future__ import annotations

import importlib.util

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
# Importing it here would choose its accelerator.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

import deepspeed_checks
from helpers import selected_cases
from ranks import spawn

CASES = [("trains", stage, recipe) for stage in (1, 2, 3) for recipe in ("fp8", "nvfp4")]
CASES += [("resumes", 2, "fp8"), ("resumes", 3, "nvfp4"), ("refuses", 2), ("refuses", 3)]
CASES += [("trainer", 2), ("trainer", 3)]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(deepspeed_checks.run, 2, tmp_path_factory.mktemp("deepspeed"), selected_cases(request))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training(case, raised):
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]
