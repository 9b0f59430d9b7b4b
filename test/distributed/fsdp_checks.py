"""Checks of FSDP2 on bits, losses and gradients: each runs on every rank of a mesh and raises what is wrong."""

import copy
import itertools
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import (
    adamw,
    assert_gathers_exactly,
    assert_same_losses,
    assert_same_norms,
    assert_trains_as_unsharded,
    averages_exactly,
    batch,
    blocks,
    counted_reductions,
    gathered,
    mean_of_equal,
    shard,
    train,
)
from helpers import Tied, converted, replace
from ranks import device
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, _compat
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# Rows whose splits fall on block borders, within blocks, unevenly, and leave ranks with nothing.
ROWS = (512, 300, 129, 64, 33, 3, 1)


def gathers_exactly_at_any_split(mesh, config):
    """Before any optimizer, from its masters, and after values are copied in; in the policy's dtype."""
    for rows, columns in itertools.product(ROWS, (160, 33)):
        model = nn.Sequential(nn.Linear(columns, rows, bias=False))
        # Each rank begins with different values and keeps its rows of them.
        values = [random_tensor(rows, columns, seed=rank, device=device()) for rank in range(mesh.size())]
        model[0].weight.data = values[mesh.get_rank()].clone()
        quantize_(model, config)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        per_rank = -(-rows // mesh.size())
        expected = torch.cat([v[r * per_rank : (r + 1) * per_rank] for r, v in enumerate(values)])
        weight = model[0].weight
        assert weight.shape == (rows, columns) and weight.dtype == torch.float32
        optimizer = adamw(model) if columns == 33 else None
        assert_bitwise_equal(gathered(weight), expected)
        assert_gathers_exactly(model, config, torch.bfloat16)
        with torch.no_grad():
            weight.copy_(distribute_tensor(expected * 3, mesh, weight.placements, src_data_rank=None))
        if hasattr(optimizer, "master"):
            assert_bitwise_equal(optimizer.master(weight).full_tensor(), expected * 3)
        assert_bitwise_equal(gathered(weight), expected * 3)
        assert_gathers_exactly(model, config, torch.bfloat16)


def trains_as_unsharded(mesh, config, hidden: int = 150, **options):
    """Losses and values bit for bit. In two dims amaxes are reduced among the two ranks that share a weight."""
    model, reference = blocks(config, hidden=hidden), blocks(config, hidden=hidden)
    assert_trains_as_unsharded(shard(model, mesh, **options), reference, config, mesh)


def asks_no_store(mesh, config):
    """After the first step, ranks exchange nothing through the store that they met at."""
    kinds = []
    for masters in (True, False):
        model = shard(blocks(replace(config, master_weights=masters)), mesh)
        kinds.append((model, adamw(model) if masters else MasterWeightOptimizer(torch.optim.AdamW, model)))
    for model, optimizer in kinds:
        train(model, optimizer, steps=1)
    with mock.patch.object(_compat, "default_store", side_effect=AssertionError("the store is asked")):
        for model, optimizer in kinds:
            train(model, optimizer, steps=2)


def gives_ranks_seeds_of_their_own(mesh, config):
    """They agree in all else, and round the gradients of one batch by other bits."""
    for masters in (True, False):
        own = replace(config, seed=mesh.get_rank(), master_weights=masters)
        model, x = shard(blocks(own), mesh), batch().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        for same, y in ((True, out.detach()), (False, x.grad)):
            parts = [torch.empty_like(y) for _ in range(mesh.size())]
            dist.all_gather(parts, y.contiguous(), group=mesh.get_group())
            assert torch.equal(*parts) is same, (masters, same)


def shards_columns(mesh, config):
    """Shard(1), whose shards cut blocks along the contraction."""
    trains_as_unsharded(mesh, config, hidden=144, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


def reshards_to_fewer_ranks(mesh, config):
    """FSDP2 cannot gather extensions from such shards: they are made whole shards, with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trains_as_unsharded(mesh, config, reshard_after_forward=2)
    messages = [str(w.message) for w in caught if "reshard_after_forward as a number of ranks" in str(w.message)]
    assert len(messages) == 1 and "2 modules reshard to all ranks" in messages[0], messages


def offloads(mesh, config):
    trains_as_unsharded(mesh, config, offload_policy=CPUOffloadPolicy(pin_memory=False))


def trains_in_mixed_precision(mesh, config):
    """fp32 masters, gathered from bf16: the loss and gradients of a bf16 model, reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = shard(blocks(config), mesh, mp_policy=policy), blocks(config).to(torch.bfloat16)
    losses = [m(batch(dtype=torch.bfloat16)).float().square().mean() for m in (model, reference)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        assert p.dtype == p.grad.dtype == torch.float32 and type(p.grad.to_local()) is torch.Tensor
        if averages_exactly(mesh):
            assert_bitwise_equal(p.grad.full_tensor(), mean_of_equal(q.grad.float(), mesh.size()), name)
    adamw(model).step()
    assert_gathers_exactly(model, config, torch.bfloat16)


def leaves_frozen_weights(mesh, config):
    model, reference = blocks(config), blocks(config)
    for m in (model, reference):
        m[0].requires_grad_(False)
        m[1].up.weight.requires_grad_(False)
    shard(model, mesh)
    assert_trains_as_unsharded(model, reference, config, mesh)
    assert not model[0].up.weight.requires_grad


class TiedSequence(Tied):
    def forward(self, x):
        return super().forward((x.abs() * 10).long())


def ties_embeddings(mesh, config):
    """The head's weight is gathered in high precision, because the embedding looks rows up in it."""
    torch.manual_seed(0)
    model = converted(TiedSequence().to(device()), config)
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_same_losses(model, reference)
    model.unshard()
    assert type(model.lm_head.weight) is MasterWeightTensor and model.lm_head.weight is model.embed.weight
    assert model.lm_head.weight.quantized_bytes == 0


def checkpoints_activations(mesh, config):
    assert_same_losses(shard(nn.Sequential(*map(checkpoint_wrapper, blocks(config))), mesh), blocks(config))
    # The whole forward pass, root hooks included, runs again in backward.
    for reentrant in (False, True):
        whole = shard(blocks(config), mesh)
        with counted_reductions() as count:
            checkpoint(whole, batch().requires_grad_(), use_reentrant=reentrant).square().mean().backward()
        assert count() == (mesh.size() > 1), (reentrant, count())


def clips_and_steps(mesh, config):
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        model, reference = shard(blocks(config), mesh), blocks(config)
        actual = train(model, adamw(model, **options), clip=0.05)
        # The last bits of a norm depend on how many pieces its squares are summed in: both clip by the same.
        expected = train(reference, adamw(reference, **options), clip=0.05, norms=actual[1::2])
        assert actual[::2] == expected[::2], (options, actual, expected)
        assert_same_norms(actual[1::2], expected[1::2], reference)
        assert_gathers_exactly(model, config)


def compiles_blocks(mesh, config):
    model = blocks(config)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=False)
    assert_same_losses(shard(model, mesh), blocks(config))
    assert_gathers_exactly(model, config)
