"""Checks of models under DistributedDataParallel on each rank: eager, and compiled, where buckets split the graph."""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from every_layer import CONFIGS, make
from helpers import assert_same_tensors, converted, mlp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from torchao_blockwise import weights_unchanged
from torchao_blockwise.nn import SwiGLUMLP
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

# Layers whose input has one reader besides the residual connection: their gradients are summed in eager mode's order.
LAYERS = ("linear", "two", "norm_linear", "swiglu_mlp", "experts", "grouped")
TINY = {"bucket_cap_mb": 0.005}


class Residual(nn.Module):
    """Layers with a residual connection around each: where a graph is split, their input has another reader."""

    def __init__(self, layers: list[nn.Module], width: int = 64):
        super().__init__()
        self.layers, self.width = nn.ModuleList(layers), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = layer(x)
            x = x + F.pad(out, (0, self.width - out.shape[1]))
        return x


def small(config: str, layers: tuple[str, ...] = LAYERS) -> Residual:
    return Residual([make(name, CONFIGS[config]) for name in layers])


def large(config: str) -> Residual:
    """More parameters than the 25 MB of PyTorch's own buckets."""
    model = Residual([nn.Linear(1024, 1024), SwiGLUMLP(1024, 2048), nn.Linear(1024, 1024)], width=1024)
    return converted(model, CONFIGS[config])


MODELS = {
    "small": small,
    "linear": functools.partial(small, layers=("two", "two")),
    "mixture": functools.partial(small, layers=("swiglu_mlp", "experts")),
    "large": large,
}
OPTIONS = {
    "tiny_buckets": TINY,
    "default_buckets": {},
    "static_graph": {**TINY, "static_graph": True},
    "unused_parameters": {**TINY, "find_unused_parameters": True},
    "accumulation": TINY,
}


def one_step(model: nn.Module, wrapped: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    loss = run(batch(model, 33)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def accumulated_steps(model: nn.Module, wrapped: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    """Two steps of two microbatches with as many token counts, and an evaluation before each of them."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(2):
        for micro, count in enumerate((33, 40)):
            x = batch(model, count + step)
            with torch.no_grad():
                results.append(run(x).square().mean())
            with wrapped.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = run(x).square().mean()
                loss.backward()
            results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results


def batch(model: Residual, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + count)
    return torch.randn(count, model.width, generator=generator)


def compiles(rank: int, model_name: str, config: str, order: str, backend: str, option: str) -> None:
    """Losses and gradients are bitwise identical to eager mode under DDP, and within 1e-3 of it by inductor."""
    torch._dynamo.reset()
    # PyTorch refuses buckets that are smaller than the first one.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000 if "bucket_cap_mb" in OPTIONS[option] else 2**20
    results, steps = [], accumulated_steps if option == "accumulation" else one_step
    for counter in (None, CompileCounterWithBackend(backend)):
        torch.manual_seed(0)
        model = MODELS[model_name](config)

        def compiled(module, counter=counter):
            dynamic = True if option == "accumulation" else None
            return module if counter is None else torch.compile(module, backend=counter, dynamic=dynamic)

        if order == "DDP(compile)":
            wrapped = run = DistributedDataParallel(compiled(model), **OPTIONS[option])
        else:
            wrapped = DistributedDataParallel(model, **OPTIONS[option])
            run = compiled(wrapped)
        results.append(steps(model, wrapped, run))
    assert counter.frame_count > 1, "the buckets split no graph"
    for expected, got in zip(*results, strict=True):
        if backend == "inductor":
            assert relative_error(got, expected) < 1e-3
        else:
            assert_bitwise_equal(got, expected)


def averages(rank: int, config: str) -> None:
    """Gradients are the mean over ranks, and a scope of unchanged weights changes no bits of a training."""
    states = []
    for scope in (contextlib.nullcontext, weights_unchanged):
        model, single = mlp(CONFIGS[config]), mlp(CONFIGS[config])
        parallel, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):
            single.load_state_dict(model.state_dict())
            single.zero_grad()
            with scope(parallel) if scope is weights_unchanged else scope():
                for micro in range(3):
                    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                    single(x).square().sum().backward()
                    with parallel.no_sync() if micro < 2 else contextlib.nullcontext():
                        parallel(x).square().sum().backward()
                assert (model[0].weight.quantized_bytes > 0) == (scope is weights_unchanged)
            for p, of_rank in zip(model.parameters(), single.parameters()):
                dist.all_reduce(of_rank.grad)
                assert relative_error(p.grad, of_rank.grad / dist.get_world_size()) < 1e-6
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert_same_tensors(*states)


# ("averages", config) and ("compiles", model, config, which wraps which, backend, option).
CASES = {
    2: (
        [
            ("averages", "fp8"),
            ("compiles", "small", "fp8", "compile(DDP)", "aot_eager", "tiny_buckets"),
            ("compiles", "small", "nvfp4", "DDP(compile)", "aot_eager", "tiny_buckets"),
            ("compiles", "mixture", "fp8", "DDP(compile)", "inductor", "tiny_buckets"),
            ("compiles", "linear", "nvfp4", "compile(DDP)", "inductor", "tiny_buckets"),
        ],
        [
            ("averages", "nvfp4"),
            *(
                ("compiles", "large", config, order, "inductor", "default_buckets")
                for config in ("fp8", "nvfp4")
                for order in ("compile(DDP)", "DDP(compile)")
            ),
            *(
                ("compiles", "small", config, order, "aot_eager", option)
                for config, order in (("fp8", "compile(DDP)"), ("nvfp4", "DDP(compile)"))
                for option in ("accumulation", "static_graph", "unused_parameters")
            ),
        ],
    )
}


def start(rank: int, count: int):
    checks = {"compiles": compiles, "averages": averages}
    return lambda name, *arguments: checks[name](rank, *arguments)
