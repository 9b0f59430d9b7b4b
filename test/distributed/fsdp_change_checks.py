"""Checks of FSDP2 on weights that change: whatever writes, the next forward pass reads it on every rank."""

from __future__ import annotations

import torch
from fsdp_models import (
    Counter,
    adamw,
    assert_gathers_exactly,
    batch,
    blocks,
    masters_of,
    raises,
    shard,
    train,
)

from torchao_blockwise import MasterWeightTensor, weights_unchanged
from torchao_blockwise.distributed import sync_weight_scales


def by_numpy(parameters):
    """This rank's part, by an alias that PyTorch knows nothing of."""
    for p in parameters:
        if isinstance(local := p.to_local(), MasterWeightTensor):
            values = local.hp.detach()
            (torch.from_dlpack(values) if values.is_cuda else torch.from_numpy(values.numpy())).mul_(1.5)


def by_compiled_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.compile(optimizer.step)()
    optimizer.zero_grad()


def by_hand(parameters):
    with torch.no_grad():
        for p in parameters:
            p.mul_(2)


def by_one_rank(parameters):
    """Where it owns rows."""
    for p in parameters:
        if p.device_mesh.get_local_rank() == 0 and isinstance(local := p.to_local(), MasterWeightTensor):
            local.hp.mul_(0.5)


WRITERS = (by_numpy, by_hand, by_one_rank, by_compiled_optimizer)


def outcome(model, parameters, x):
    """(output, gradients) of one pass; parameters: the sharded ones, also where the model holds what was gathered."""
    for p in parameters:
        p.grad = None
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.to_local().clone() for p in parameters)]


def assert_reads_what_is_there(model, parameters, config, mesh, **options):
    """The next pass, training or not, is that of a model that begins with the values of now."""
    fresh = shard(blocks(config), mesh, **options)
    others = list(fresh.parameters())
    with torch.no_grad():
        for p, q in zip(others, parameters, strict=True):
            p.to_local().copy_(getattr(q.to_local(), "hp", q.to_local()))
        assert torch.equal(model(batch(7)), fresh(batch(7)))
    for a, b in zip(outcome(model, parameters, batch(8)), outcome(fresh, others, batch(8)), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        model(batch(9))


def follows_every_writer(mesh, config):
    for reshard in (True, False):
        model = shard(blocks(config), mesh, reshard_after_forward=reshard)
        train(model, adamw(model), steps=1)
        parameters = list(model.parameters())
        for write in WRITERS:
            before = model(batch(7)).detach()
            write(parameters)
            assert not torch.equal(model(batch(7)), before)
            assert_reads_what_is_there(model, parameters, config, mesh, reshard_after_forward=reshard)


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


def refills_what_evaluation_left_gathered(mesh, config):
    """Evaluation, an edit, a forward pass: `reshard_after_forward=False` leaves the old gather where it was."""
    model = shard(blocks(config), mesh, reshard_after_forward=False)
    masters = masters_of(model)
    with torch.no_grad():
        before = model(batch())
        for p in masters.values():
            p.mul_(2)
        after = model(batch())
    fresh = shard(blocks(config), mesh)
    with torch.no_grad():
        for p in masters_of(fresh).values():
            p.mul_(2)
        assert torch.equal(after, fresh(batch())) and not torch.equal(after, before)


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
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad.to_local(), grad)


def quantizes_shards_once_in_a_scope(mesh, config):
    model, reference = shard(blocks(config), mesh), blocks(config)
    optimizer, other = adamw(model), adamw(reference)
    for step in range(2):
        with weights_unchanged(model), Counter() as counter:
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model(batch(3 * step + micro)).square().mean().backward()
            with torch.no_grad():
                model(batch())
        assert counter.reductions == (1 if mesh.size() > 1 else 0), counter.reductions
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
