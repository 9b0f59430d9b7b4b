"""Models, training loops and comparisons that the checks of FSDP2 share; they run on every rank."""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, PER_EXPERT, RECIPES, converted, replace
from ranks import device
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, _compat, ops
from torchao_blockwise.distributed import MasterWeightOptimizer, sync_weight_scales
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

# The same bits as Triton's interpreter, many times faster.
_ALL = RECIPES | {
    "nvfp4_full": FULL,
    "nvfp4_per_expert": PER_EXPERT,
    # Without draws, which differ from pass to pass.
    "nvfp4_per_expert_nearest": replace(PER_EXPERT, stochastic_rounding=False),
}
CONFIGS = {name: replace(config, backend="reference") for name, config in _ALL.items()}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name not in ("fp8", "nvfp4")]
every_config = pytest.mark.parametrize("config", ("fp8", "nvfp4", "mixed", *SLOW))
both = pytest.mark.parametrize("config", ("fp8", "nvfp4"))
WIDTH = 48
# Steps must be bitwise identical; on a GPU foreach, the default only for plain tensors, divides differently.
FOR_LOOP = {"foreach": False}
# Results of other kernels, whose sums differ in the last bits: some elements that are quantized next round the other
# way. Quantizing on another grid, or with another scale, would make three times as much in FP8, and more in NVFP4.
ANOTHER_ROUNDING = 1e-2


def raises(kind, message: str):
    return pytest.raises(kind, match=re.escape(message))


def config_of(name: str):
    """The config of that name for this rank, "_quantized" with quantized Parameters; on a GPU with AUTO's kernels."""
    kind = name.removesuffix("_quantized")
    return replace((CONFIGS if device().type == "cpu" else _ALL)[kind], master_weights=kind == name)


def values(p: torch.Tensor) -> torch.Tensor:
    """This rank's high-precision values of a parameter: a quantized one's master, if it has one."""
    local = _compat.local_of(p)
    if isinstance(local, QuantizedTensor):
        pending = local.pending_master
        master = None if pending is None else pending.master(p)
        return local.values() if master is None else _compat.local_of(master)
    return getattr(local, "hp", local).detach()


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(config, hidden: int = 150, count: int = 2, dtype=torch.float32, where=None, times: float = 1):
    """times: by what its values are multiplied, so that what is not loaded is seen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, hidden) for _ in range(count))).to(where or device(), dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(times)
    return converted(model, config)


def shard(model: nn.Sequential, mesh, **options) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def masters_of(model) -> dict:
    return {
        name: p
        for name, p in model.named_parameters()
        if isinstance(getattr(p, "_local_tensor", None), MasterWeightTensor)
    }


def shards_of(model) -> dict:
    return {n: p for n, p in model.named_parameters() if isinstance(getattr(p, "_local_tensor", None), QuantizedShard)}


def has_only_decoded_values(p) -> bool:
    local = _compat.local_of(p)
    return local.pending_master.master(p) is None and not local.awaits_cast


def gathered(parameter) -> torch.Tensor:
    """The whole high-precision weight, put together without FSDP2."""
    mesh, dim = parameter.device_mesh, next(p.dim for p in parameter.placements if isinstance(p, Shard))
    group = mesh.get_group(mesh.ndim - 1)
    parts = [None] * group.size()
    dist.all_gather_object(parts, values(parameter).cpu(), group=group)
    return torch.cat(parts, dim).view(parameter.shape)


def quantized(hp: torch.Tensor, config):
    options = {"power_of_2_scales": config.power_of_2_scales, "scale_per_group": config.scale_per_expert}
    return ops.quantize(hp, config.weight_format, **options, backend="reference").rowwise


def assert_is_quantized(weight, hp: torch.Tensor, config, name: str) -> None:
    expected = quantized(hp, config)
    assert type(weight) is (NVFP4Tensor if config.weight_format.has_global_scale else BlockwiseFP8Tensor), type(weight)
    assert weight.dtype == hp.dtype and weight.shape == hp.shape and weight.config == config
    for part in ("qdata", "scale", "global_scale"):
        if getattr(expected, part) is not None:
            assert_bitwise_equal(getattr(weight, part), getattr(expected, part), f"{name}.{part}")


def assert_gathers_exactly(model, config, dtype=None) -> None:
    """Every quantized weight of every FSDP2 module equals the whole weight quantized, bit for bit."""
    # The decoded values of a shard need not quantize to the same scale in fp32.
    decoded = {name for name, p in shards_of(model).items() if has_only_decoded_values(p)}
    wholes = {name: gathered(p) for name, p in (masters_of(model) | shards_of(model)).items()}
    assert wholes
    sync_weight_scales(model)
    for prefix, module in model.named_modules():
        if hasattr(module, "unshard"):
            module.unshard()
            for name, weight in module.named_parameters(prefix=prefix):
                if name in wholes and not hasattr(weight, "placements"):
                    hp = wholes.pop(name)
                    if name in decoded:
                        assert_bitwise_equal(weight.dequantize(hp.dtype), hp, name)
                    else:
                        assert_is_quantized(weight, hp.to(dtype or hp.dtype), config, name)
            module.reshard()
    assert not wholes, f"never gathered: {list(wholes)}"


def batch(step: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step)).to(device(), dtype)


def mean_of_equal(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """The mean by FSDP2 of equal gradients of `ranks` ranks over gloo: their sum, divided. With 3 both round."""
    total = gradient
    for _ in range(ranks - 1):
        total = total + gradient
    return total / ranks


def averages_exactly(mesh) -> bool:
    """Whether `mean_of_equal` is bitwise identical to the collective: over gloo always, over NCCL for powers of two."""
    return device().type == "cpu" or mesh.size() in (1, 2, 4)


def train(model, optimizer, steps: int = 3, microbatches: int = 1, clip=None, offset: int = 0, norms=()):
    """The losses, and norms of gradients where they are clipped.

    norms: clip by these, one a step, and not by the model's own, which is still returned.
    """
    losses: list[float] = []
    for step in range(offset, offset + steps):
        for micro in range(microbatches):
            if microbatches > 1 and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            loss = model(batch(step * microbatches + micro)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            losses.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
            by = torch.tensor(norms[step - offset], device=device()) if norms else norm
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, by)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model, **options):
    """AdamW, around the masters of a model that has quantized Parameters."""
    options = {"lr": 1e-2, **FOR_LOOP, **options}
    if any(isinstance(_compat.local_of(p), QuantizedTensor) for p in model.parameters()):
        return MasterWeightOptimizer(torch.optim.AdamW, model, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def assert_trains_as_unsharded(model, reference, config, mesh) -> None:
    """Losses and final weights of the sharded model are those of the unsharded one, bit for bit."""

    def average(p):
        p.grad = mean_of_equal(p.grad, mesh.size())

    for p in reference.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(average)
    # They hold the masters of quantized Parameters, whose final values are compared.
    optimizers = [adamw(m) for m in (reference, model)]
    expected, actual = (train(m, o) for m, o in zip((reference, model), optimizers))
    assert_gathers_exactly(model, config)
    if not averages_exactly(mesh):
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=ANOTHER_ROUNDING, atol=0)
        return
    assert actual == expected, f"losses {actual}, unsharded {expected}"
    originals = dict(reference.named_parameters())
    for name, p in (masters_of(model) | shards_of(model)).items():
        assert_bitwise_equal(gathered(p).cpu(), values(originals[name]).cpu(), name)


def assert_same_losses(model, reference) -> None:
    actual, expected = (train(m, adamw(m)) for m in (model, reference))
    assert actual == expected, (actual, expected)


def assert_same_norms(actual: list[float], expected: list[float], model) -> None:
    """Norms of equal gradients, whose squares are summed in another order.

    A sum of n squares has n roundings to fp32 of at most 2^-24 each, whatever the order; its root has half of them.
    """
    n = sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=n * 2.0**-24, atol=0)


@contextlib.contextmanager
def counted_reductions():
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        yield lambda: sum(call.kwargs.get("op") == dist.ReduceOp.MAX for call in calls.call_args_list)
