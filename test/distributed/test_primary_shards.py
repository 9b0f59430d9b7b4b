"""Quantized Parameters under FSDP2: the bits of high-precision shards, and of one process, at every split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import selected_cases

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from checkpoint_checks import assert_plain_and_equal, die_while_saving, state_of
from fsdp_models import CONFIGS, train
from fsdp_run import PRIMARY_CHECKS, cases, run_checks, size_of
from primary_shard_life_checks import with_primary_weights
from primary_shard_models import master_adamw, primary
from ranks import spawn, spawn_cases
from test_fsdp import RANKS, case_id
from torch.distributed.checkpoint import state_dict as dsd

CASES = cases(PRIMARY_CHECKS)


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What each rank raised in each selected case: all run in one set of processes."""
    folder = tmp_path_factory.mktemp("primary_shards")
    return spawn_cases(run_checks, RANKS, folder, selected_cases(request), size_of)


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_primary_shards(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)


def test_a_rank_that_dies_while_saving_loses_no_earlier_checkpoint(tmp_path):
    """Killed between data and metadata: the checkpoint before has the masters and their states, which go on alone."""
    saved = spawn(die_while_saving, 2, tmp_path, str(tmp_path), "committing", with_primary_weights)[0]
    assert ".metadata" not in {path.name for path in (tmp_path / "2").iterdir()}
    model, reference = primary(CONFIGS["fp8"], seed=3), primary(CONFIGS["fp8"])
    optimizer, reference_optimizer = master_adamw(model), master_adamw(reference)
    state = state_of(model, optimizer)
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path / "2", no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path / "1", no_dist=True)
    dsd.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_plain_and_equal(model.state_dict(), saved)
    # With two ranks the gradients of equal data are exact.
    train(reference, reference_optimizer, steps=1)
    expected = train(reference, reference_optimizer, steps=2, offset=1)
    assert train(model, optimizer, steps=2, offset=1) == expected
