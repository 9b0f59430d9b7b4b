"""Checks of quantized Parameters under FSDP2 from loads to checkpoints; each runs on every rank of a mesh."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from checkpoint_checks import (
    assert_plain_and_equal,
    load,
    shared_folder,
    state_of,
    trains_on_other_ranks,
    values_of,
    whole,
)
from fsdp_life_checks import assert_frees_what_it_gathers
from fsdp_models import (
    CONFIGS,
    Block,
    adamw,
    batch,
    blocks,
    shard,
    train,
)
from helpers import replace
from primary_shard_models import (
    assert_gathers,
    master_adamw,
    masters,
    message_of,
    primary,
    shards_of,
    trains_as_high_precision_shards,
)
from ranks import device
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torchao.quantization import quantize_

from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.testing import assert_bitwise_equal


def leaves_frozen_weights(mesh, config):
    """A quantized base: no masters, the bits of its conversion; ranks that converted other values are told so."""
    model, alone = primary(config), primary(config)
    for m in (model, alone):
        m.requires_grad_(False)
        m[1].up.requires_grad_(True)
    wholes = {
        name: p.detach() for name, p in alone.named_parameters() if name.endswith(".weight") and "norm" not in name
    }
    shard(model, mesh)
    optimizer, reference = master_adamw(model), master_adamw(alone)
    expected = train(alone, reference)
    assert train(model, optimizer) == expected
    for name, p in shards_of(model).items():
        assert p.requires_grad == (name == "1.up.weight")
        if not p.requires_grad:
            held = p.to_local()
            rows = slice(held.part.start, held.part.start + held.shape[0])
            assert_bitwise_equal(held.qdata, wholes[name].qdata[rows], name)
            assert_bitwise_equal(held.values(), wholes[name].dequantize(torch.float32)[rows], name)
    if mesh.size() > 1:
        other = primary(config, seed=mesh.get_rank() + 1)
        message = message_of(shard(other.requires_grad_(False), mesh), batch())
        assert message.startswith("nothing"), message
        other = primary(config, seed=mesh.get_rank() + 1).requires_grad_(False)
        for module in other.modules():
            for p in module.parameters(recurse=False):
                if hasattr(p, "pending_master"):
                    p.pending_master = None
        message = message_of(shard(other, mesh), batch())
        assert message.startswith("ValueError: sync_weight_scales: ranks differ; rank 0 has 0.up.weight [150, 48]"), (
            message
        )


def loads(mesh, config):
    """Values that are loaded, in place or by assignment, with an optimizer or without, are gathered and trained on."""
    source = shard(blocks(config), mesh)
    train(source, adamw(source), steps=2)
    state = {name: x.clone() for name, x in source.state_dict().items()}
    expected_output = source(batch()).detach()
    expected = train(source, adamw(source), steps=2)
    wholes = whole(state)
    for assign in (False, True):
        for first in ("optimizer", "load"):
            model = primary(config, mesh, seed=7)
            if first == "optimizer" and not assign:
                optimizer = master_adamw(model)
                train(model, optimizer, steps=1)
                optimizer.state.clear()
                optimizer = None
            model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)
            assert len(shards_of(model)) == 4
            optimizer = master_adamw(model) if first == "optimizer" else None
            assert torch.equal(model(batch()), expected_output)
            assert_gathers(model, {name: wholes[name] for name in shards_of(model)}, config)
            if optimizer is not None:
                assert_plain_and_equal(values_of(model, optimizer), wholes)
                assert train(model, optimizer, steps=2) == expected


def adopts_loads(mesh, config):
    """What is loaded while an optimizer has the masters becomes theirs, whatever comes first after it."""
    source = shard(blocks(config), mesh)
    train(source, adamw(source), steps=2)
    state = {name: x.clone() for name, x in source.state_dict().items()}
    for next_step in ("forward", "state_dict", "master", "step"):
        model = primary(config, mesh)
        optimizer = master_adamw(model)
        model.load_state_dict(state)
        if next_step == "forward":
            model(batch())
        elif next_step == "step":
            optimizer.step()
        elif next_step == "master":
            masters(model, optimizer)
        if next_step in ("state_dict", "master"):
            assert_plain_and_equal(whole(model.state_dict()), whole(state))
        assert_plain_and_equal(values_of(model, optimizer), whole(state))
        sync_weight_scales(model)
        assert_gathers(model, masters(model, optimizer), config)


def casts_loads_between_microbatches(mesh, config):
    """Also those whose gradients are not reduced."""
    model, fresh = primary(config, mesh), primary(config, mesh)
    values = {name: 2 * x.clone() for name, x in model.state_dict().items()}
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    for m in (model, fresh):
        m.load_state_dict(values)
    assert torch.equal(model(batch()), fresh(batch()))


def refuses_stale_values(mesh, config):
    """Gathers of backward are of the forward pass: values that are loaded between the two must not pass unseen."""
    model = primary(config, mesh)
    loss = model(batch()).sum()
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    message = message_of(loss.backward)
    assert "whose values were loaded" in message and "sync_weight_scales(model) on all ranks" in message, message


def starts_on_meta(mesh, config):
    with torch.device("meta"):
        model = nn.Sequential(Block(48, 150), Block(48, 150))
        quantize_(model, replace(config, master_weights=False))
    shard(model, mesh)
    model.to_empty(device=device())
    reference = shard(blocks(config), mesh)
    model.load_state_dict({name: x.clone() for name, x in reference.state_dict().items()})
    assert len(shards_of(model)) == 4
    assert train(model, master_adamw(model)) == train(reference, adamw(reference))


def refuses(mesh, config):
    """What cannot work is refused by name, with a remedy."""
    quantized = replace(config, master_weights=False)

    def linear(**options):
        model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device())
        quantize_(model, quantized)
        return fully_shard(model, mesh=mesh, **options)

    message = message_of(linear, shard_placement_fn=lambda p: Shard(1))
    assert message == (
        "ValueError: fully_shard: weight [64, 64] is quantized itself, and Shard(1) would cut its rows; shard dim 0, "
        "or convert with master_weights=True"
    ), message
    message = message_of(linear, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert "leave CPUOffloadPolicy out, or convert with master_weights=True" in message, message
    model = primary(config)
    optimizer = master_adamw(model)
    message = message_of(shard, model, mesh)
    assert "make MasterWeightOptimizer after fully_shard" in message and optimizer, message
    for options in ({"shard": "zero1"}, {"process_group": dist.group.WORLD}):
        message = message_of(master_adamw, linear(), **options)
        assert message == (
            "ValueError: MasterWeightOptimizer: 0.weight is split by FSDP2 already; leave process_group and shard out, "
            "which are for whole weights"
        ), message
    message = message_of(linear()[0].weight.to_local().t)
    assert "convert with master_weights=True" in message, message
    message = message_of(master_adamw, primary(config, mesh), weight_decay=0.1 * mesh.get_rank())
    assert message.startswith("ValueError: MasterWeightOptimizer: ranks differ; rank 0 has AdamW, "), message


def reshards_to_fewer_ranks(mesh, config):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trains_as_high_precision_shards(mesh, config, policies={"reshard_after_forward": 2})
    assert len([w for w in caught if "reshard_after_forward as a number of ranks" in str(w.message)]) == 2


def frees_what_it_gathers(mesh, config):
    model = primary(config, mesh)
    assert_frees_what_it_gathers(model, master_adamw(model))


def resumes(mesh, config):
    """Training goes on as if it had not stopped: the same bits; saved meanwhile, and in its own time."""
    model = primary(config, mesh)
    optimizer = master_adamw(model)
    train(model, optimizer, steps=2)
    group = dist.new_group(backend="gloo")
    with shared_folder() as folder:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / "saved")
        saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder / "async", process_group=group)
        expected = train(model, optimizer, steps=2, offset=2)
        saving.result()
        for name in ("saved", "async"):
            resumed = primary(config, mesh, seed=5)
            fresh = master_adamw(resumed)
            train(resumed, fresh, steps=1)
            load(resumed, fresh, folder / name)
            assert_gathers(resumed, masters(resumed, fresh), config)
            assert train(resumed, fresh, steps=2, offset=2) == expected
            assert_plain_and_equal(values_of(resumed, fresh), values_of(model, optimizer))
            for key, state in dsd.get_optimizer_state_dict(resumed, fresh)["state"].items():
                assert_plain_and_equal(
                    whole(state), whole(dsd.get_optimizer_state_dict(model, optimizer)["state"][key])
                )


def reshards(mesh, config):
    """What the last checkpoint holds besides: a file of plain tensors."""

    def start(mesh, step):
        model = primary(config, mesh, seed=step)
        return model, master_adamw(model)

    def check(model, optimizer):
        assert_gathers(model, masters(model, optimizer), config)

    with shared_folder() as folder:
        expected = trains_on_other_ranks(mesh, config, folder, start, check)
        if mesh.get_rank() == 0:
            dcp_to_torch_save(folder / "4", folder / "whole.pt")
            file = torch.load(folder / "whole.pt", weights_only=True)
            assert_plain_and_equal(file["model"], expected)
            plain = blocks(None)
            plain.load_state_dict(file["model"])


def gives_full_state_dicts(mesh, config):
    """Of the model and of the optimizer, to files of one process and to one that is not sharded."""
    model = primary(config, mesh)
    optimizer = master_adamw(model)
    train(model, optimizer, steps=2)
    options = dsd.StateDictOptions(full_state_dict=True)
    state = dsd.get_model_state_dict(model, options=options)
    # Copied: the step counts are those of the optimizer, which goes on counting.
    full = copy.deepcopy(optimizer.full_state_dict())
    assert_plain_and_equal(state, whole(model.state_dict()))
    expected = train(model, optimizer, steps=2, offset=2)
    alone = primary(config, seed=3)
    alone_optimizer = master_adamw(alone)
    alone.load_state_dict(state)
    alone_optimizer.load_state_dict(copy.deepcopy(full))
    losses = train(alone, alone_optimizer, steps=2, offset=2)
    assert losses == expected
    again = primary(config, mesh, seed=4)
    again_optimizer = master_adamw(again)
    dsd.set_model_state_dict(again, dict(state), options=options)
    again_optimizer.load_state_dict(full)
    # A model's state after that of its optimizer leaves the masters.
    again.load_state_dict(again.state_dict())
    assert_gathers(again, masters(again, again_optimizer), config)
    assert train(again, again_optimizer, steps=2, offset=2) == expected


def with_primary_weights(mesh):
    model = primary(CONFIGS["fp8"], mesh)
    return model, master_adamw(model)
