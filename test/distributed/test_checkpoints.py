"""Checkpoints of sharded weights: nothing is lost where a rank dies. Those that live are in `checkpoint_checks.py`."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_checks import DEATHS, assert_plain_and_equal, die_while_saving, state_of
from fsdp_models import CONFIGS, adamw, batch, blocks, config_of, masters_of, shard, train
from ranks import spawn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import CPUOffloadPolicy

from torchao_blockwise.testing import assert_bitwise_equal


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


def test_masters_go_on_from_the_checkpoint_before_one_that_was_cut_off(tmp_path):
    """Killed between data and metadata: the checkpoint before has the masters and their states, which go on alone."""
    saved = spawn(die_while_saving, 2, tmp_path, str(tmp_path), "committing", "fp8_quantized")[0]
    assert ".metadata" not in {path.name for path in (tmp_path / "2").iterdir()}
    model, reference = (blocks(config_of("fp8_quantized"), times=times) for times in (3, 1))
    optimizer, reference_optimizer = adamw(model), adamw(reference)
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
