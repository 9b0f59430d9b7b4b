"""Layers of several recipes, compiled with inductor's disk caches on: a process of test_compile_caches.py.

    python cached_graphs.py RECIPE ...

Fails where compiled results are not eager ones. Prints as JSON how many stored graphs each case of each recipe found,
and how many it looked for in vain. Layers are bare products in bf16, for which inductor compiles no code, so results
are the same bits.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import FP8, FP8_POW2, NVFP4, converted, replace
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torchao_blockwise import experts

RECIPES = {
    "fp8": FP8,
    "nvfp4": NVFP4,
    # One field of the config, whose repr has all, is not FP8's.
    "fp8_pow2": FP8_POW2,
    "unconverted": None,
    "fp8_weight": replace(FP8, master_weights=False),
    "nvfp4_weight": replace(NVFP4, master_weights=False),
}


class Experts(nn.Module):
    """Products of experts whose weight may be a DTensor, [E, N, K], or handed over transposed already."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 48, 64, dtype=torch.bfloat16))
        self.ends = torch.tensor([5, 20, 33], dtype=torch.int32)
        self.transposed: torch.Tensor | None = None

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        weight = weight.transpose(-2, -1) if self.transposed is None else self.transposed
        return F.grouped_mm(x, weight, offs=self.ends)


def linear(config, mesh):
    return converted(nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), config)


def tensor_parallel(config, mesh):
    return parallelize_module(linear(config, mesh), mesh, ColwiseParallel())


def fsdp(config, mesh):
    return fully_shard(linear(config, mesh), mesh=mesh)


def local_experts(config, mesh):
    module = converted(Experts(), config, experts())
    local = module.weight.detach()
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    return module


def transposed_experts(config, mesh):
    module = converted(Experts(), config, experts())
    module.transposed = module.weight.detach().transpose(-2, -1)
    return module


CASES = {make.__name__: make for make in (linear, tensor_parallel, fsdp, local_experts, transposed_experts)}


def results(run, module) -> list[torch.Tensor]:
    """Output without gradients, then output and gradients of a pass with them."""
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    with torch.no_grad():
        inferred = run(x)
    module.zero_grad()
    out = run(x)
    out.square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = (inferred, out.detach(), x.grad, *gradients)
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def run(case: str, recipe: str, mesh) -> tuple[int, int]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module = CASES[case](RECIPES[recipe], mesh)
    expected = results(module, module)
    got = results(torch.compile(module), module)
    assert all(map(torch.equal, got, expected)), f"{case} in {recipe} has other results"
    hits, misses = (
        counters["aot_autograd"][f"autograd_cache_{what}"] + counters["inductor"][f"fxgraph_cache_{what}"]
        for what in ("hit", "miss")
    )
    return hits, misses


# Alone in an empty folder too, backward of this one raises: the gradient of the weight is taken for an NVFP4Tensor.
NOT_COMPILED = ("nvfp4_weight", "tensor_parallel")


if __name__ == "__main__":
    # PyTorch 2.11 has no such hash of a DTensor yet.
    untouched = not hasattr(getattr(DTensor, "_stable_hash_for_caching", None), "__wrapped__")
    assert untouched and "torchao_blockwise" not in torch.compiler.config.cache_key_tag, "the import changed PyTorch"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one_rank = dist.device_mesh.init_device_mesh("cpu", (1,))
    found = {
        recipe: {case: run(case, recipe, one_rank) for case in CASES if (recipe, case) != NOT_COMPILED}
        for recipe in sys.argv[1:]
    }
    print(json.dumps(found))
    sys.stdout.flush()
    # Not by returning: threads of gloo may wait for the interpreter.
    os._exit(0)
