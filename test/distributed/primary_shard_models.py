"""Quantized Parameters under FSDP2: models, optimizers and comparisons that their checks share."""

from __future__ import annotations

import torch
from checkpoint_checks import assert_plain_and_equal, values_of, whole
from fsdp_models import (
    FOR_LOOP,
    adamw,
    assert_is_quantized,
    blocks,
    shard,
    train,
)
from helpers import replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import QuantizedShard


def primary(config, mesh=None, *, seed: int = 0, count: int = 2, **options) -> nn.Sequential:
    """Blocks whose weights are quantized themselves, sharded where there is a mesh."""
    model = blocks(None, count=count)
    torch.manual_seed(seed)
    if seed:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape))  # drawn on the CPU, whatever the device
    quantize_(model, replace(config, master_weights=False))
    return model if mesh is None else shard(model, mesh, **options)


def master_adamw(model, **options) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, model, lr=1e-2, **FOR_LOOP | options)


def shards_of(model) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if isinstance(getattr(p, "_local_tensor", None), QuantizedShard)}


def assert_gathers(model, wholes: dict[str, torch.Tensor], config, dtype=None) -> None:
    """Every quantized weight of every FSDP2 module is that of `wholes`, quantized whole, bit for bit."""
    config, left = replace(config, master_weights=False), dict(wholes)
    for prefix, module in model.named_modules():
        if hasattr(module, "unshard"):
            module.unshard()
            for name, weight in module.named_parameters(prefix=prefix):
                if name in left and not hasattr(weight, "placements"):
                    hp = left.pop(name)
                    assert_is_quantized(weight, hp.to(dtype or hp.dtype), config, name)
            module.reshard()
    assert not left, f"never gathered: {list(left)}"


def masters(model, optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.master(p).full_tensor() for name, p in shards_of(model).items() if p.requires_grad}


def primary_weight(hp: torch.Tensor, config):
    """`hp` as the Parameter of a converted layer."""
    layer = nn.Linear(*hp.shape[::-1], bias=False, dtype=hp.dtype)
    layer.weight.data = hp
    quantize_(layer, replace(config, master_weights=False))
    return layer.weight.detach()


def message_of(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, NotImplementedError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def trains_as_high_precision_shards(mesh, config, steps: int = 3, clip: float | None = 0.5, **options):
    """The losses, norms of gradients and final values of FSDP2 with high-precision shards, bit for bit."""
    policies = options.pop("policies", {})
    reference = shard(blocks(config), mesh, **policies)
    expected = train(reference, adamw(reference, **options), steps=steps, clip=clip)
    model = primary(config, mesh, **policies)
    optimizer = master_adamw(model, **options)
    assert len(shards_of(model)) == 4
    actual = train(model, optimizer, steps=steps, clip=clip)
    assert actual == expected, f"{actual}\n{expected}"
    assert_plain_and_equal(values_of(model, optimizer), whole(reference.state_dict()))
    policy = policies.get("mp_policy")
    assert_gathers(model, masters(model, optimizer), config, policy and policy.param_dtype)
    return model, optimizer
