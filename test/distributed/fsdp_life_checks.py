"""Checks of FSDP2 on how a sharded model lives: begun, loaded, changed, entered, freed, grouped."""

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    Block,
    adamw,
    assert_gathers_exactly,
    assert_same_losses,
    assert_trains_as_unsharded,
    batch,
    blocks,
    counted_reductions,
    masters_of,
    raises,
    shard,
    shards_of,
    train,
    values,
)
from helpers import assert_same, converted, mlp, replace
from ranks import device
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, weights_unchanged
from torchao_blockwise._compat import modes
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.ops.device import tables
from torchao_blockwise.testing import assert_bitwise_equal


def starts_on_meta(mesh, config):
    with torch.device("meta"):
        model = converted(nn.Sequential(Block(48, 150), Block(48, 150)), config)
    shard(model, mesh)
    model.to_empty(device=device())
    source = shard(blocks(replace(config, master_weights=True)), mesh)
    model.load_state_dict({name: x.clone() for name, x in source.state_dict().items()})
    assert masters_of(model) or shards_of(model)
    assert_trains_as_unsharded(model, blocks(config), config, mesh)


def refuses_stale_values(mesh, config):
    """Gathers of backward are of the forward pass: a change between the two must not pass unseen."""
    for synced in (False, True):
        model = shard(blocks(config), mesh)
        loss = model(batch()).sum()
        with torch.no_grad():
            model[0].down.weight.copy_(model.state_dict()["0.down.weight"] * 2)
        if synced:
            sync_weight_scales(model)
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"0\.down\.weight.* values changed.*sync_weight_scales\(model\)"):
                loss.backward()


def enters_by_other_ways(mesh, config):
    model = blocks(config)
    type(model).encode = lambda self, x: self.forward(x)
    shard(model, mesh)
    register_fsdp_forward_method(model, "encode")
    expected = blocks(config)(batch())
    assert torch.equal(model.encode(batch()), expected)
    with torch.no_grad():
        model[0].up.weight.mul_(2)
    changed = model.encode(batch())
    assert not torch.equal(changed, expected)
    assert torch.equal(model[1](model[0](batch())), changed)
    with torch.inference_mode():
        assert torch.equal(model(batch()), changed)
    early = shard(blocks(config), mesh)
    optimizer = adamw(early)
    for step in range(2):
        for module in (early, *early):
            module.unshard(async_op=True)
        train(early, optimizer, steps=1, offset=step)
    assert_gathers_exactly(early, config)


def infers_first(mesh, config):
    """The first pass of a sharded model may be one under inference mode."""
    model, reference = shard(blocks(config), mesh), blocks(config)
    with torch.inference_mode():
        for step in range(2):
            assert torch.equal(model(batch(step)), reference(batch(step)))


def frees_what_it_gathers(mesh, config):
    """20 steps: as many live storages and bytes at the end of each, and gathered payload freed with each reshard."""
    model = shard(blocks(config), mesh)
    optimizer = adamw(model)
    payloads, seen = {}, []

    def look(block, args):
        payloads[block.up] = block.up.weight.qdata
        assert payloads[block.up].untyped_storage().nbytes() > 0

    for block in model:
        block.register_forward_pre_hook(look)
    train(model, optimizer, steps=1)
    gc.collect()
    # What lives by now is not looked at again.
    gc.freeze()
    for step in range(20):
        train(model, optimizer, steps=1, offset=step)
        # Of launches for many tensors a bounded number of tables is kept, of addresses and sizes.
        tables._tables.clear()
        gc.collect()
        tensors = [
            x for x in gc.get_objects() if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, nn.Parameter)
        ]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        seen.append((len(tensors), len(storages), sum(storages.values())))
        del tensors
        assert len(payloads) == 2 and all(q.untyped_storage().nbytes() == 0 for q in payloads.values())
    gc.unfreeze()
    # The smallest: gloo may hold what it has just reduced a moment longer.
    assert min(seen[1:6]) == min(seen[-5:]), seen


def dies_with_the_model(mesh, config):
    model = shard(blocks(config), mesh)
    sync_weight_scales(model)
    train(model, adamw(model), steps=1)
    gone = [weakref.ref(x) for x in (model, model[0].up, masters_of(model)["0.up.weight"]._local_tensor.hp)]
    del model
    gc.collect()
    assert not any(x() is not None for x in gone)


def synchronises_by_hand(mesh, config):
    """Before the first forward pass too, in one all-reduce, and FSDP2 still finds its root."""
    model, expected = shard(blocks(config), mesh), blocks(config)(batch())
    for _ in range(2):
        with counted_reductions() as count:
            sync_weight_scales(model)
        assert count() == (mesh.size() > 1)
        assert torch.equal(model(batch()), expected)


def gathers_few_bytes(mesh, config):
    """Of the payload that a rank gives FSDP2 to send."""
    for rows in (256, 250):
        model = converted(nn.Sequential(nn.Linear(128, rows, bias=False)).to(device()), config)
        weight = fully_shard(model, mesh=mesh)[0].weight
        sync_weight_scales(model)
        payload, _ = weight.to_local().fsdp_pre_all_gather(mesh, weight.shape, weight.stride(), model[0], None)
        padded, even = -(-rows // mesh.size()), rows % mesh.size() == 0
        wanted = padded * 128 * (0.5 if even and config.weight_format.element.bits == 4 else 1)
        assert sum(x.nbytes for x in payload) == wanted, rows


def replicates_and_groups(mesh, config):
    """Roots of one module each, modules that FSDP2 gathers together, and data parallelism without shards."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    expected = train(reference := blocks(config, count=3), adamw(reference))
    for wrap, reductions in (("roots", 9), ("groups", 3), ("replicas", 0)):
        model = blocks(config, count=3)
        if wrap == "roots":
            for block in model:
                fully_shard(block, mesh=mesh)
        elif wrap == "groups":
            fully_shard([model[0], model[1]], mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            for module in (*model, model):
                replicate(module, mesh=mesh)
        with counted_reductions() as count:
            actual = train(model, adamw(model))
        assert (actual, count()) == (expected, reductions), wrap


class Gather(nn.Module):
    """How SimpleFSDP gathers: a parametrization that replicates the sharded parameter."""

    def forward(self, x):
        return x.redistribute(placements=[Replicate()]).to_local()


def gathers_by_redistribution(mesh, config):
    """DTensor gathers in high precision; layers quantize what they get, and a warning says so once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for hidden in (150, 151):
            model, reference = blocks(config, hidden=hidden), blocks(config, hidden=hidden)
            for module in list(model.modules()):
                for name, p in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))
                    parametrize.register_parametrization(module, name, Gather(), unsafe=True)
            weight = model[0].up.weight
            assert type(weight) is MasterWeightTensor and type(weight.hp) is torch.Tensor
            assert_same_losses(model, reference)
    messages = [w for w in caught if "gathered in high precision" in str(w.message)]
    assert len(messages) <= 1


class Own(nn.Linear):
    """A separate forward pass: by default that of `nn.Linear`, of a cast weight."""

    def forward(self, x):
        if getattr(self, "decodes", False):
            return x @ self.weight.dequantize().T
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def checks_forward_passes(mesh, config):
    """The gathered weight counts as the layer's own; what multiplies by no weight is refused on every rank."""
    model = blocks(None)
    for block in model:
        block.up.__class__ = Own
    quantize_(model, config)
    shard(model, mesh)
    with torch.no_grad():
        model.eval()(batch())
    model.train()(batch()).sum().backward()
    for block in model:
        assert block.up.checked == {True, False} and block.up.weight.grad is not None
    wrong = blocks(None)
    wrong[1].up.__class__, wrong[1].up.decodes = Own, True
    quantize_(wrong, config)
    with raises(NotImplementedError, "1.up: Own.forward ran no low-precision GEMM with its converted weight"):
        shard(wrong, mesh)(batch())


# --- changes: whatever writes, the next forward pass reads it on every rank -------------------------------------------


def by_numpy(parameters):
    """Changes values on the first rank, by an alias that PyTorch does not know."""
    for p in parameters:
        if p.device_mesh.get_local_rank() == 0 and isinstance(local := p.to_local(), MasterWeightTensor):
            hp = local.hp.detach()
            (torch.from_dlpack(hp) if hp.is_cuda else torch.from_numpy(hp.numpy())).mul_(1.5)


def by_compiled_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.compile(optimizer.step)()
    optimizer.zero_grad()


def outcome(model, parameters, x):
    """(output, gradients) of one pass; parameters: the sharded ones, also where the model holds what was gathered."""
    for p in parameters:
        p.grad = None
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.to_local().clone() for p in parameters)]


def follows_every_writer(mesh, config):
    """The next pass, training or not, is that of a model that begins with the values of now."""
    for reshard in (True, False):
        model = shard(blocks(config), mesh, reshard_after_forward=reshard)
        train(model, adamw(model), steps=1)
        # The sharded ones, also while the model holds what was gathered.
        parameters = list(model.parameters())
        for write in (by_numpy, by_compiled_optimizer):
            before = model(batch(7)).detach()
            write(parameters)
            fresh = shard(blocks(config), mesh, reshard_after_forward=reshard)
            others = list(fresh.parameters())
            with torch.no_grad():
                for p, q in zip(others, parameters, strict=True):
                    p.to_local().copy_(getattr(q.to_local(), "hp", q.to_local()))
            after = model(batch(7)).detach()
            assert not torch.equal(after, before)
            assert_same(outcome(model, parameters, batch(8)), outcome(fresh, others, batch(8)))
            assert torch.equal(after, fresh(batch(7)))
            with torch.no_grad():
                model(batch(9))


def writes_as_to_plain_weights(mesh, config):
    """Collectives write to `p.data` of master weights, as an optimizer calls them, and one that shares its work."""
    group = mesh.get_group()

    def send(p):
        dist.send(p, dst=1, group=group) if mesh.get_rank() == 0 else dist.recv(p, src=0, group=group)

    def zero_redundancy(parameters):
        options = {"process_group": group, "lr": 0.1, "foreach": False}
        for p in parameters:
            p.grad = torch.ones_like(p)
        ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options).step()

    def every(write):
        return lambda parameters: [write(p.data) for p in parameters]

    broadcast = every(lambda p: dist.broadcast(p, src=0, group=group))
    for write in (broadcast, every(lambda p: dist.all_reduce(p, group=group)), every(send), zero_redundancy):
        model, plain, before = (mlp(c, seed=mesh.get_rank()).to(device()) for c in (config, None, None))
        assert isinstance(model[0].weight, MasterWeightTensor)
        for m in (model, plain):
            write(list(m.parameters()))
        for p, q, old in zip(model.parameters(), plain.parameters(), before.parameters(), strict=True):
            assert_bitwise_equal(values(p), values(q))
            # The first rank's values are what is sent.
            assert mesh.get_rank() == 0 or not torch.equal(q, old)


def follows_changes_between_microbatches(mesh, config):
    """Also where gradients are not reduced, and where weights stay gathered between."""
    for held in (False, True):
        model = shard(blocks(config), mesh, reshard_after_forward=not held)
        model(batch()).sum().backward()
        sharded = list(model.parameters())
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(not held)
        model(batch()).sum().backward()
        by_numpy(sharded)
        actual = model(batch()).detach()
        fresh = shard(blocks(config), mesh)
        by_numpy(list(fresh.parameters()))
        assert torch.equal(actual, fresh(batch()))


def keeps_the_scales_of_what_is_gathered(mesh, config):
    """A sync between forward and backward leaves a held gather with the scales that it was gathered with."""
    model = shard(blocks(config), mesh, reshard_after_forward=False)
    reference = shard(blocks(config), mesh)
    expected = outcome(reference, list(reference.parameters()), batch())[1:]
    masters = masters_of(model)
    out = model(batch())
    with torch.no_grad():
        for p in masters.values():
            p.mul_(64)
    sync_weight_scales(model)
    out.square().sum().backward()
    assert_same((p.grad.to_local() for p in model.parameters()), expected)


def casts_to_the_same_scales_in_a_capture(mesh, config):
    """A table has their addresses already; what a graph writes to lives on, though later passes have other scales."""

    def scales() -> list[StorageWeakRef]:
        model(batch())
        shards = [p.to_local().shard for p in masters_of(model).values()]
        tensors = [x for one in shards for x in (one.scale, one.global_scale) if x is not None]
        return [StorageWeakRef(x.untyped_storage()) for x in tensors]

    model = shard(blocks(config), mesh)
    before, captured = scales(), scales()
    with mock.patch.object(modes, "is_capturing", lambda x: True):
        with torch.no_grad():
            for p in masters_of(model).values():
                p.mul_(2)
        assert scales() == captured
    assert_gathers_exactly(model, config)
    assert scales() != captured
    gc.collect()
    assert all(x.expired() for x in before) and not any(x.expired() for x in captured)


def quantizes_shards_once_in_a_scope(mesh, config):
    model, reference = shard(blocks(config), mesh), blocks(config)
    optimizer, other = adamw(model), adamw(reference)
    for step in range(2):
        with weights_unchanged(model), counted_reductions() as count:
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model(batch(3 * step + micro)).square().mean().backward()
            with torch.no_grad():
                model(batch())
        assert count() == (mesh.size() > 1), count()
        for micro in range(3):
            reference(batch(3 * step + micro)).square().mean().backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
        with torch.no_grad():
            assert torch.equal(model(batch()), reference(batch()))
    assert_gathers_exactly(model, config)


def refuses_changes_in_a_scope(mesh, config):
    model = shard(blocks(config), mesh)
    with weights_unchanged(model):
        model(batch()).sum().backward()
        with torch.no_grad():
            model[1].down.weight.mul_(2)
        with raises(RuntimeError, "weights_unchanged: 1.down.weight was changed inside the scope"):
            model(batch())
