"""Checks of checkpoints over ranks: each runs on every rank of a mesh and raises what is wrong."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_checks import TiedSequence
from fsdp_models import adamw, assert_gathers_exactly, batch, blocks, masters_of, shard, train
from ranks import device, shared_folder, whole_state
from tensor_parallel_checks import PLANS, block
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchao.quantization import quantize_

from torchao_blockwise import recipe_state
from torchao_blockwise.testing import assert_bitwise_equal


def state_of(model, optimizer) -> dict:
    model_state, optimizer_state = dsd.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(model, optimizer, folder, **options) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, **options)
    dsd.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def values_of(model, optimizer) -> dict[str, torch.Tensor]:
    """The whole values that train: masters, where the optimizer has them."""
    return whole_state(getattr(optimizer, "model_state_dict", model.state_dict)())


def assert_plain_and_equal(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name, x in expected.items():
        assert type(actual[name]) is torch.Tensor, (name, type(actual[name]))
        assert_bitwise_equal(actual[name], x, name)


def holds_plain_shards(mesh, config):
    """The state dict of an unconverted model, in the memory of the masters; a change there is gathered."""
    model, plain = shard(blocks(config), mesh), shard(blocks(None), mesh)
    expected = plain.state_dict()
    for _ in range(2):
        state, masters = model.state_dict(), masters_of(model)
        assert list(state) == list(expected) and len(masters) == 4
        for name, x in state.items():
            assert type(x) is DTensor and type(x.to_local()) is torch.Tensor and not x.requires_grad
            assert (x.placements, x.shape, x.stride()) == (expected[name].placements, x.shape, x.stride())
            assert x.device_mesh == expected[name].device_mesh
            assert_bitwise_equal(x.to_local(), expected[name].to_local(), name)
        for name, p in masters.items():
            assert state[name].to_local().data_ptr() == p.to_local().hp.data_ptr()
        kept = model.state_dict(keep_vars=True)
        assert all(kept[name] is p for name, p in model.named_parameters())
        model(batch())
    before = model(batch()).detach()
    state = model.state_dict()
    for name in masters:
        state[name].mul_(2)
    assert not torch.equal(model(batch()), before)
    assert_gathers_exactly(model, config)


def reshards(mesh, config):
    """A step on all ranks, on 2, on 1, and on all again: losses and weights are bitwise identical to one process."""
    reference = blocks(config)
    reference_optimizer = adamw(reference)
    expected = train(reference, reference_optimizer, steps=4)
    meshes = {n: DeviceMesh(device().type, list(range(n))) for n in (1, 2)} | {mesh.size(): mesh}
    with shared_folder() as folder:
        for step, ranks in enumerate((mesh.size(), 2, 1, mesh.size())):
            dist.barrier()
            if mesh.get_rank() >= ranks:
                continue
            group = meshes[ranks].get_group()
            model = shard(blocks(config, times=-0.5 if step else 1), meshes[ranks])
            optimizer = adamw(model)
            if step:
                # Over what it has trained.
                train(model, optimizer, steps=1)
                load(model, optimizer, folder / str(step), process_group=group)
            assert_gathers_exactly(model, config)
            assert train(model, optimizer, steps=1, offset=step) == [expected[step]]
            saved = {"checkpoint_id": folder / str(step + 1), "process_group": group}
            dcp.async_save(state_of(model, optimizer), **saved).result()
        assert_plain_and_equal(values_of(model, optimizer), values_of(reference, reference_optimizer))
        last = whole_state(model.state_dict())
        if mesh.get_rank() == 0:
            # The last checkpoint as a file of plain tensors.
            dcp_to_torch_save(folder / "4", folder / "whole.pt")
            assert_plain_and_equal(torch.load(folder / "whole.pt", weights_only=True)["model"], last)


def gives_full_state_dicts(mesh, config):
    """Of the model and of the optimizer, only on rank 0, and back: from all ranks, or sent by rank 0."""
    model = shard(blocks(config), mesh)
    optimizer = adamw(model)
    train(model, optimizer, steps=2)
    offloaded = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dsd.get_model_state_dict(model, options=offloaded)
    # Copied: the step counts are those of the optimizer, which goes on counting.
    optimizer_state = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=offloaded))
    expected = whole_state(model.state_dict())
    if mesh.get_rank() == 0:
        assert_plain_and_equal(state, expected)
        moments = optimizer_state["state"]["0.up.weight"]
        assert type(moments["exp_avg"]) is torch.Tensor and moments["exp_avg"].shape == expected["0.up.weight"].shape
    else:
        assert state == {} and optimizer_state == {}
    losses = train(model, optimizer, steps=2, offset=2)
    # With gloo next to NCCL, PyTorch puts what was on no device on the CPU, whatever the mesh.
    from_meta = ("to meta",) if device().type == "cpu" else ()
    for way in ("broadcast", "everywhere", *from_meta):
        if way == "to meta":
            with torch.device("meta"):
                fresh = blocks(config, where="meta")
            fresh = shard(fresh, mesh)
        else:
            fresh = shard(blocks(config, times=-0.5), mesh)
            fresh(batch())
        sent = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=way != "everywhere")
        dsd.set_model_state_dict(fresh, dict(expected if way == "everywhere" else state), options=sent)
        assert_gathers_exactly(fresh, config)
        assert_plain_and_equal(whole_state(fresh.state_dict()), expected)
        fresh_optimizer = adamw(fresh)
        sent = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_optimizer_state_dict(fresh, fresh_optimizer, copy.deepcopy(optimizer_state), options=sent)
        assert train(fresh, fresh_optimizer, steps=2, offset=2) == losses, way


def assigns(mesh, config):
    """`load_state_dict(assign=True)` keeps shards master weights, also while they lie gathered after a forward pass."""
    bits = recipe_state(blocks(config))
    model, plain = fully_shard(blocks(config), mesh=mesh), fully_shard(blocks(None, times=-0.5), mesh=mesh)
    expected = {name: x.clone() for name, x in plain.state_dict().items()}
    for part in ("0.up.", ""):
        # A root stays gathered.
        model(batch())
        up = model[0].up
        assert not hasattr(up.weight, "placements")
        if part:
            # A layer by itself: nothing before it has sharded its weight again.
            up.load_state_dict({name: expected[part + name].clone() for name in ("weight", "bias")}, assign=True)
            assert_bitwise_equal(up.weight.full_tensor().hp, expected[part + "weight"].full_tensor())
        model.load_state_dict({name: x.clone() for name, x in expected.items()}, assign=True)
        assert len(masters_of(model)) == 4
        assert all(p.to_local().config == config and p.requires_grad for p in masters_of(model).values())
        assert_gathers_exactly(model, config)
        assert recipe_state(model) == bits
        assert_plain_and_equal(whole_state(model.state_dict()), whole_state(expected))


def saves_two_dims(mesh, config):
    """FSDP2 over tensor parallelism: rows that both dims of the mesh split, and columns."""

    def two_dims():
        return fully_shard(parallelize_module(block(config), mesh["inner"], PLANS), mesh=mesh["outer"])

    state = two_dims().state_dict()
    with shared_folder() as folder:
        dcp.save(state, checkpoint_id=folder)
        for target, options in ((two_dims(), {}), (block(config), {"no_dist": True})):
            with torch.no_grad():
                for p in target.parameters():
                    p.zero_()
            dcp.load(target.state_dict(), checkpoint_id=folder, **options)
            assert_plain_and_equal(whole_state(target.state_dict()), block(config).state_dict())


def saves_shared_weights(mesh, config):
    torch.manual_seed(0)
    model, target = TiedSequence().to(device()), TiedSequence().to(device())
    for m in (model, target):
        quantize_(m, config)
        fully_shard(m, mesh=mesh)
    expected = whole_state(model.state_dict())
    assert list(expected) == list(TiedSequence().state_dict())
    with shared_folder() as folder:
        dcp.save(dsd.get_model_state_dict(model), checkpoint_id=folder)
        state = dsd.get_model_state_dict(target)
        dcp.load(state, checkpoint_id=folder)
        dsd.set_model_state_dict(target, state)
    assert target.embed.weight is target.lm_head.weight
    assert_plain_and_equal(whole_state(target.state_dict()), expected)
