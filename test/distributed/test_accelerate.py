"""accelerate's FSDP2, and Hugging Face's Trainer over it: every converted weight trains."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("accelerate", "1.6")
pytest.importorskip("transformers")

from accelerate_run import run_cases
from ranks import spawn_cases

# (what trains, model, recipe, precision, whether one rank alone loads)
CASES = [
    *(("accelerator", "llama", "fp8", *rest) for rest in itertools.product(("no", "bf16"), (True, False))),
    *(("accelerator", kind, "fp8", *rest) for kind in ("tied", "moe") for rest in (("no", True), ("bf16", False))),
    ("accelerator", "llama", "nvfp4", "no", True),
    ("quantized", "llama", "fp8_quantized", "bf16", True),
    ("quantized", "moe", "nvfp4_quantized", "no", True),
    ("quantized", "llama", "fp8_quantized", "no", False),
    ("trainer", "llama", "fp8", "bf16", True),
    ("trainer", "moe", "fp8", "no", False),
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("accelerate")
    return spawn_cases(run_cases, 2, folder, selected_cases(request), lambda case: 2, lambda case: False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_weight_trains(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
