"""Checks of quantized Parameters under FSDP2; each runs on every rank of a mesh."""

from __future__ import annotations

import itertools

import torch
from fsdp_models import (
    Counter,
    CountingGather,
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
    primary,
    primary_weight,
    trains_as_high_precision_shards,
)
from ranks import device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torchao.quantization import quantize_

from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# --- bits -------------------------------------------------------------------------------------------------------------

# Rows whose splits fall on block borders, within blocks, unevenly, and leave ranks with nothing.
ROWS = (512, 129, 64, 33, 3, 1)


def gathers_exactly_at_any_split(mesh, config):
    """Before any optimizer, from its masters, and after values are copied in; in the policy's dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for rows, columns in itertools.product(ROWS, (160, 33)):
        model = nn.Sequential(nn.Linear(columns, rows, bias=False))
        # Ranks begin with values of their own, of which each keeps its rows.
        values = [random_tensor(rows, columns, seed=rank, device=device()) for rank in range(mesh.size())]
        model[0].weight.data = values[mesh.get_rank()].clone()
        quantize_(model, replace(config, master_weights=False))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        per_rank = -(-rows // mesh.size())
        expected = torch.cat([v[r * per_rank : (r + 1) * per_rank] for r, v in enumerate(values)])
        weight = model[0].weight
        assert weight.shape == (rows, columns) and weight.dtype == torch.float32
        optimizer = master_adamw(model) if columns == 33 else None
        sync_weight_scales(model)
        assert_gathers(model, {"0.weight": expected}, config, torch.bfloat16)
        if optimizer is None:
            # Without a master: what the payload stands for.
            stands_for = primary_weight(expected.bfloat16(), config).dequantize(torch.float32)
            assert_bitwise_equal(model.state_dict()["0.weight"].full_tensor(), stands_for)
        with torch.no_grad():
            weight.copy_(distribute_tensor(expected * 3, mesh, weight.placements, src_data_rank=None))
        if optimizer is not None:
            assert_bitwise_equal(optimizer.master(weight).full_tensor(), expected * 3)
        sync_weight_scales(model)
        assert_gathers(model, {"0.weight": expected * 3}, config, torch.bfloat16)


def keeps_dtypes_of_gradients(mesh, config):
    """`grad_dtype` does what it does for a model that is not converted, after a move of the shards too."""

    def dtypes_of(config) -> list[dict]:
        model, found = blocks(None, dtype=torch.bfloat16), []
        for p in model.parameters():
            p.grad_dtype = torch.float32
        if config is not None:
            quantize_(model, config)
        shard(model, mesh)
        for _ in range(2):
            model(batch().bfloat16()).sum().backward()
            found.append({name: p.grad.dtype for name, p in model.named_parameters()})
            model.zero_grad()
            model.to(device())
        return found

    expected = dtypes_of(None)
    for masters in (True, False):
        assert dtypes_of(replace(config, master_weights=masters)) == expected, masters


def trains_long(mesh, config):
    """Many steps of one block in one group, of rows that split unevenly: 105 on two ranks, 30 on others."""
    models = blocks(config, 33, 50, count=1), blocks(None, 33, 50, count=1)
    quantize_(models[1], replace(config, master_weights=False))
    losses = []
    for model, make in zip(models, (adamw, master_adamw)):
        fully_shard(model, mesh=mesh)
        losses.append(train(model, make(model), steps=105 if mesh.size() == 2 else 30, width=33))
    assert losses[0] == losses[1], losses


def trains_in_many_ways(mesh, config):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trains_as_high_precision_shards(mesh, config, policies={"mp_policy": policy})
    trains_as_high_precision_shards(mesh, config, policies={"reshard_after_forward": False})
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        trains_as_high_precision_shards(mesh, config, clip=0.05, **options)


def shards_hybrid(mesh, config):
    trains_as_high_precision_shards(mesh, config)


def accumulates(mesh, config):
    reference, model = shard(blocks(config), mesh), primary(config, mesh)
    expected = train(reference, adamw(reference), steps=2, microbatches=3)
    optimizer = master_adamw(model)
    with Counter() as counter:
        assert train(model, optimizer, steps=2, microbatches=3) == expected
    assert counter.reductions == (2 if mesh.size() > 1 else 0), counter.reductions


def compiles_blocks(mesh, config):
    """The bits of compiled high-precision shards."""
    losses = []
    for model in (blocks(config), primary(config)):
        for block in model:
            block.compile(backend="aot_eager", fullgraph=False)
        shard(model, mesh)
        losses.append(train(model, master_adamw(model), clip=0.5))
    assert losses[0] == losses[1], losses


def gathers_few_bytes(mesh, config):
    """1 byte an element, or half of one where rows split evenly; and as little at rest, divided by the ranks."""
    fmt, ranks = config.weight_format, mesh.size()
    for rows in (512, 250):
        model = nn.Sequential(nn.Linear(256, rows, bias=False)).to(device())
        quantize_(model, replace(config, master_weights=False))
        fully_shard(model, mesh=mesh)
        optimizer, counter = master_adamw(model), CountingGather()
        model.set_custom_all_gather(counter)
        model(batch(width=256))
        model.reshard()
        per_rank = -(-rows // ranks)
        wanted = per_rank * 256 * (0.5 if rows % ranks == 0 and fmt.element.bits == 4 else 1)
        assert counter.bytes == wanted, (rows, counter.bytes, wanted)
        local = model[0].weight.to_local()
        scales = fmt.nbytes(rows, 256) - rows * 256 * fmt.element.bits // 8
        assert local.nbytes == local.shape[0] * 256 * fmt.element.bits // 8 + scales
        assert optimizer.master(model[0].weight).to_local().shape == local.shape
