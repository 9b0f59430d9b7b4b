"""Writers over ranks: what collectives, optimizers that share their work and compiled steps write is what is read next.

Each is compared with a fresh conversion of the same values, bit for bit. FSDP2's are in `fsdp_change_checks.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ranks import spawn
from writers_over_ranks import CASES, run_writers


@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> list:
    """What each rank raised in each case."""
    return spawn(run_writers, 2, tmp_path_factory.mktemp("writers"), list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_the_next_pass_reads_what_was_written(case, raised):
    results = [(of_rank or {}).get(case, "not reached") for of_rank in raised]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
