"""Checkpoints of sharded master weights: plain tensors on disk, any number of ranks, nothing lost where a rank dies."""

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
from checkpoint_checks import DEATHS, die_while_saving
from fsdp_models import CONFIGS, batch, blocks, masters_of, shard
from fsdp_run import CHECKPOINT_CHECKS, cases, run_checks, size_of
from ranks import spawn, spawn_cases
from test_fsdp import RANKS, case_id
from torch.distributed.fsdp import CPUOffloadPolicy

from torchao_blockwise.testing import assert_bitwise_equal

CASES = cases(CHECKPOINT_CHECKS)


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """What each rank raised in each selected case: all run in one set of processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return spawn_cases(run_checks, RANKS, folder, selected_cases(request), size_of)


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_checkpoints(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
def test_offloaded_shards_are_saved_where_they_lie():
    """On the CPU, in the memory of the masters, whatever the device of the mesh."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.DeviceMesh("cuda", [0])
        model = shard(blocks(CONFIGS["fp8"]).cuda(), mesh, offload_policy=CPUOffloadPolicy())
        x = batch().cuda()
        before, state, masters = model(x), model.state_dict(), masters_of(model)
        for name, p in masters.items():
            assert state[name].to_local().data_ptr() == p.to_local().hp.data_ptr()
            assert state[name].to_local().device.type == "cpu"
        state["0.up.weight"].mul_(2)
        assert not before.equal(model(x))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_while_saving_loses_no_earlier_checkpoint(death, tmp_path):
    """The second checkpoint has data and no metadata, with which alone it would be one; the first one loads."""
    saved = spawn(die_while_saving, 2, tmp_path, str(tmp_path), death)[0]
    data = {"__0_0.distcp", "__1_0.distcp"}
    assert {path.name for path in (tmp_path / "1").iterdir()} == {".metadata", *data}
    left = {path.name for path in (tmp_path / "2").iterdir()}
    assert f"__{DEATHS[death][0]}_0.distcp" in left and ".metadata" not in left
    assert death == "writing" or data <= left
    model = blocks(CONFIGS["fp8"])
    state = {"model": model.state_dict()}
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path / "2", no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path / "1", no_dist=True)
    for name, x in model.state_dict().items():
        assert_bitwise_equal(x, saved[name], name)
