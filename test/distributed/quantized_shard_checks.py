"""Checks of quantized Parameters under FSDP2 that those of master weights do not make; each runs on every rank."""

import copy

import torch
import torch.distributed as dist
from checkpoint_checks import assert_plain_and_equal, values_of
from fsdp_models import (
    adamw,
    assert_gathers_exactly,
    batch,
    blocks,
    counted_reductions,
    raises,
    shard,
    shards_of,
    train,
)
from helpers import converted, replace
from ranks import device, whole_state
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torchao_blockwise.testing import assert_bitwise_equal


def clones(state: dict) -> dict:
    return {name: x.clone() for name, x in state.items()}


def trains_as_masters(mesh, config):
    """The losses, norms of gradients and final values of master weights, bit for bit, in many ways to train."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    clipped = {"clip": 0.05}
    for policies, options, how in (
        ({}, {}, {"clip": 0.5}),
        ({"mp_policy": mixed}, {}, clipped),
        ({"reshard_after_forward": False}, {"foreach": True}, clipped),
        ({}, {"fused": True}, {"microbatches": 3}),
    ):
        losses, values, reductions = [], [], []
        for masters in (True, False):
            model = shard(blocks(replace(config, master_weights=masters)), mesh, **policies)
            optimizer = adamw(model, **options)
            with counted_reductions() as count:
                losses.append(train(model, optimizer, **how))
            values.append(values_of(model, optimizer))
            reductions.append(count())
        assert losses[0] == losses[1], losses
        assert_plain_and_equal(values[1], values[0])
        assert len(shards_of(model)) == 4
        # One a step, whatever the number of forward passes.
        assert reductions[1] == (3 if mesh.size() > 1 else 0), reductions
        assert_gathers_exactly(model, config, policies and policies.get("mp_policy") and torch.bfloat16)


def keeps_dtypes_of_gradients(mesh, config):
    """`grad_dtype` does what it does for a model that is not converted, after a move of the shards too."""

    def dtypes_of(config) -> list[dict]:
        model, found = blocks(None, dtype=torch.bfloat16), []
        for p in model.parameters():
            p.grad_dtype = torch.float32
        shard(converted(model, config), mesh)
        for _ in range(2):
            model(batch().bfloat16()).sum().backward()
            found.append({name: p.grad.dtype for name, p in model.named_parameters()})
            model.zero_grad()
            model.to(device())
        return found

    expected = dtypes_of(None)
    for masters in (True, False):
        assert dtypes_of(replace(config, master_weights=masters)) == expected, masters


def leaves_frozen_weights(mesh, config):
    """A quantized base has no masters and keeps the payload of its conversion, which ranks compare."""
    model, alone = blocks(config), blocks(config)
    for m in (model, alone):
        m.requires_grad_(False)
        m[1].up.requires_grad_(True)
    wholes = {n: p.detach() for n, p in alone.named_parameters() if n.endswith(".weight") and "norm" not in n}
    shard(model, mesh)
    assert train(model, adamw(model)) == train(alone, adamw(alone))
    for name, p in shards_of(model).items():
        assert p.requires_grad == (name == "1.up.weight")
        if not p.requires_grad:
            held = p.to_local()
            rows = slice(held.part.start, held.part.start + held.shape[0])
            assert_bitwise_equal(held.qdata, wholes[name].qdata[rows], name)
            assert_bitwise_equal(held.values(), wholes[name].dequantize(torch.float32)[rows], name)
    if mesh.size() > 1:
        other = blocks(config, times=mesh.get_rank() + 1).requires_grad_(False)
        for module in (*other[0].children(), *other[1].children()):
            if hasattr(module.weight, "pending_master"):
                module.weight.pending_master = None
        with raises(ValueError, "sync_weight_scales: ranks differ; rank 0 has 0.up.weight"):
            shard(other, mesh)(batch())


def follows_loads(mesh, config):
    """Loaded values, in place or by assignment, are gathered, saved and trained on, whatever comes first after it."""
    source = shard(blocks(replace(config, master_weights=True)), mesh)
    train(source, adamw(source), steps=2)
    state = clones(source.state_dict())
    expected_output = source(batch()).detach()
    for assign, owned, next_step in (
        (False, False, "forward"),
        (True, False, "state_dict"),
        (False, True, "forward"),
        (False, True, "state_dict"),
        (False, True, "master"),
        (False, True, "step"),
        (False, True, "microbatch"),
    ):
        model = shard(blocks(config, times=3), mesh)
        optimizer = adamw(model) if owned else None
        if next_step == "microbatch":
            model.set_requires_gradient_sync(False)
            model(batch()).sum().backward()
            model.zero_grad()
        model.load_state_dict(clones(state), assign=assign)
        assert len(shards_of(model)) == 4
        if next_step in ("forward", "microbatch"):
            assert torch.equal(model(batch()), expected_output)
        elif next_step == "step":
            optimizer.step()
        elif next_step == "master":
            optimizer.master(model[0].up.weight)
        if next_step in ("state_dict", "master"):
            # Until ranks cast it.
            assert_plain_and_equal(whole_state(model.state_dict()), whole_state(state))
        if owned:
            assert_plain_and_equal(values_of(model, optimizer), whole_state(state))
        assert_gathers_exactly(model, config)
        assert torch.equal(model(batch()), expected_output)


def refuses(mesh, config):
    def linear(**options):
        model = converted(nn.Sequential(nn.Linear(64, 64, bias=False)).to(device()), config)
        return fully_shard(model, mesh=mesh, **options)

    with raises(ValueError, "is a quantized Parameter, and Shard(1) would cut its rows; shard dim 0"):
        linear(shard_placement_fn=lambda p: Shard(1))
    with raises(ValueError, "do not use CPUOffloadPolicy, or convert with master_weights=True"):
        adamw(linear(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    model = blocks(config)
    optimizer = adamw(model)
    with raises(ValueError, "create MasterWeightOptimizer after fully_shard"):
        shard(model, mesh)
    for options in ({"shard": "zero1"}, {"process_group": dist.group.WORLD}):
        with raises(ValueError, "0.weight is split by FSDP2 already; leave process_group and shard out"):
            optimizer = adamw(linear(), **options)
    with raises(ValueError, "MasterWeightOptimizer: ranks differ; rank 0 has AdamW, "):
        adamw(shard(blocks(config), mesh), weight_decay=0.1 * mesh.get_rank())
    del optimizer


def refuses_parts_of_tensor_parallelism(mesh, config):
    model = converted(nn.Sequential(nn.Linear(64, 512, bias=False)).to(device()), config)
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel()})
    with raises(NotImplementedError, "from source.dequantize() (fully_shard: convert with master_weights=True"):
        fully_shard(model, mesh=mesh["outer"])


def gives_full_state_dicts(mesh, config):
    """Of the model and of the optimizer, to one process and back, the model's after the optimizer's too."""
    model = shard(blocks(config), mesh)
    optimizer = adamw(model)
    train(model, optimizer, steps=2)
    options = dsd.StateDictOptions(full_state_dict=True)
    state = dsd.get_model_state_dict(model, options=options)
    assert_plain_and_equal(state, whole_state(model.state_dict()))
    # Copied: the step counts are those of the optimizer, which goes on counting.
    full = copy.deepcopy(optimizer.full_state_dict())
    expected = train(model, optimizer, steps=2, offset=2)
    alone = blocks(config, times=3)
    alone_optimizer = adamw(alone)
    alone.load_state_dict(state)
    alone_optimizer.load_state_dict(copy.deepcopy(full))
    assert train(alone, alone_optimizer, steps=2, offset=2) == expected
    again = shard(blocks(config, times=3), mesh)
    again_optimizer = adamw(again)
    dsd.set_model_state_dict(again, dict(state), options=options)
    again_optimizer.load_state_dict(full)
    again.load_state_dict(again.state_dict())
    assert_gathers_exactly(again, config)
    assert train(again, again_optimizer, steps=2, offset=2) == expected
