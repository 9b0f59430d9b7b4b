"""A Llama-8B-shaped stack, one whole training step: tokens/s, peak memory, and where the time goes.

Layers of Llama 3 8B, without embedding and head, bf16 weights, fused AdamW in bf16, eager and compiled (layer by
layer), without and with activation checkpointing of each layer. Checks first that the output is bf16's within the
recipe's error. Times of GEMMs (products), quantization and the rest are from torch.profiler over three steps, with each
kernel below the table.
fp8_fused: layers that read one input share its quantization, where q, k, v, gate and up are separate layers (--fuse);
fp8_fused_once: SwiGLU quantizes what it computes as well. fp8_128x128: with these blocks of grad_weight;
saved: with `save_weights="quantized"`.
MFU counts 6 FLOPs a token and weight and the causal half of attention, without recomputation, and divides them by the
989 TFLOP/s that NVIDIA states for dense bf16 on an H100 or H200. J: joules of the board for 1,000 tokens.

    python benchmarks/bench_model.py [--layers 32 --tokens 4096] [--only fp8 bf16] [--modes eager] [--fuse]
"""

from __future__ import annotations

import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from common import driver, errors, peers
from common.energy import joules
from common.errors import relative_error
from common.kernel_times import GROUP_COLUMNS, group_ms, kernels_of, longest, table
from common.report import Report
from common.timing import Timing, synchronize
from llm_training.model import Stack
from llm_training.recipes import fuse
from torch import nn

_BLOCKS = ("fp8", "fp8_128x128", "fp8_128x128_saved")
FP8 = tuple(f"{recipe}{fused}" for recipe in _BLOCKS for fused in ("", "_fused", "_fused_once"))
OURS = (*FP8, "nvfp4", "nvfp4_fused")
RECIPES = ("bf16", *OURS, "torchao", "torchao_tensorwise", "torchao_rowwise")
# Of merged projections and, with --fuse, of separate ones.
DEFAULT_RECIPES = tuple(r for r in RECIPES if not r.endswith("_fused") and r != "nvfp4")
FUSE_RECIPES = ("bf16", *FP8)
MODES = ("eager", "compiled")
COLUMNS = (
    *("recipe", "mode", "checkpointing", "tokens/s", "x bf16", "ms a step", "MFU %", "J", "peak GiB", "error"),
    *GROUP_COLUMNS,
)
_BF16_FLOPS = 989e12
# Of the whole stack: errors of layers add up.
_BUDGET = 0.5


@dataclass(frozen=True)
class Config:
    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 8
    seq_len: int = 4096
    separate: bool = False
    experts: ClassVar[int] = 0


SMOKE = Config(dim=128, hidden=256, heads=4, kv_heads=2, layers=2, seq_len=32)


def build(config: Config, recipe: str, device: torch.device) -> Stack:
    """The stack with the same weights for every recipe; raises peers.Unavailable."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(config)
    return convert(model.to(torch.bfloat16), recipe, device)


def convert(model: Stack, recipe: str, device: torch.device) -> Stack:
    """The stack trained by `recipe`; raises peers.Unavailable."""
    precision, _, fused = recipe.partition("_fused")
    model = peers.convert(model, precision, device)
    if recipe != precision:
        fuse(model, "once" if fused else "inputs")
    return model


class Trainer:
    """Steps of one model on fixed random input; each rank has other tokens."""

    def __init__(self, model: nn.Module, config: Config, tokens: int, device: torch.device, rank: int = 0):
        self.model = model
        generator = torch.Generator(device).manual_seed(1 + rank)
        shape = (max(1, tokens // config.seq_len), min(tokens, config.seq_len), config.dim)
        self.x, self.dy = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        # As it would behind an embedding.
        self.x.requires_grad_()
        self.tokens = shape[0] * shape[1]
        weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        attention = config.layers * shape[1] * config.dim
        self.flops = 6 * self.tokens * (weights + attention)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def backward(self) -> torch.Tensor | None:
        """Forward and backward; returns the loss where there is one."""
        self.model(self.x).backward(self.dy)
        return None

    def step(self) -> torch.Tensor | None:
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None
        loss = self.backward()
        self.optimizer.step()
        return loss


def time_steps(trainer: Trainer, device: torch.device, steps: int) -> tuple[Timing, int | None]:
    """Time of a step, and the most bytes that are allocated in one."""
    for _ in range(3):
        trainer.step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        synchronize(device)
        samples.append((time.perf_counter() - start) * 1e6)
    return Timing.of(samples), torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def measure(recipe: str, mode: str, config: Config, args: Namespace, expected: torch.Tensor, results: Report) -> None:
    device = results.device
    model = build(config, recipe, device)
    trainer = Trainer(model, config, args.tokens, device)
    with torch.no_grad():
        error = errors.check(relative_error(model(trainer.x), expected), _BUDGET)
    if mode == "compiled":
        torch._dynamo.reset()
        for i, layer in enumerate(model.layers):
            model.layers[i] = peers.compile_model(layer, device)
    for checkpointing in args.checkpointing:
        model.checkpointing = checkpointing == "on"
        where = f"{mode}, checkpointing {checkpointing}"
        timing, peak = time_steps(trainer, device, args.steps)
        kernels = kernels_of(trainer.step, device, 3)
        base = next((r for r in results.rows if r["recipe"] == "bf16" and r["where"] == where), None)
        row = {
            "recipe": recipe,
            "mode": mode,
            "checkpointing": checkpointing,
            "tokens/s": trainer.tokens / timing.us * 1e6,
            "ms a step": timing.us / 1e3,
            "x bf16": base["us"] / timing.us if base else None,
            "MFU %": 100 * trainer.flops / timing.us * 1e6 / _BF16_FLOPS if device.type == "cuda" else None,
            "J": None if (energy := joules(trainer.step, device)) is None else 1e3 * energy / trainer.tokens,
            "peak GiB": None if peak is None else peak / 2**30,
            "error": error,
            **group_ms(kernels),
            "where": where,
            **timing.columns(),
            "kernels": longest(kernels),
        }
        results.sections.append(table(f"{recipe}, {where}", kernels, timing.us))
        results.add(row)
        trainer.optimizer.zero_grad(set_to_none=True)


def main(argv: Sequence[str] | None = None) -> int:
    switch = ("off", "on")
    options = driver.parser(
        __doc__, only=(RECIPES, DEFAULT_RECIPES), modes=(MODES, MODES), checkpointing=(switch, switch)
    )
    driver.add_numbers(options, layers=Config.layers, tokens=8192, steps=5)
    what = f"q, k, v, gate and up are separate layers, as in transformers; {' '.join(FUSE_RECIPES)} by default"
    options.add_argument("--fuse", action="store_true", help=what)
    args, device = driver.parse(options, argv)
    config = replace(SMOKE if args.smoke else Config(layers=args.layers), separate=args.fuse)
    if args.fuse and args.only == list(DEFAULT_RECIPES):
        args.only = FUSE_RECIPES
    if args.smoke:
        args.tokens, args.steps = 2 * config.seq_len, 2
    # bf16 first: the others are compared with it.
    args.only = sorted(args.only, key=lambda recipe: recipe != "bf16")
    results = Report(f"model_{config.layers}_layers" + "_fuse" * args.fuse, device, COLUMNS, vars(args) | vars(config))
    reference = build(config, "bf16", device)
    with torch.no_grad():
        expected = reference(Trainer(reference, config, args.tokens, device).x)
    del reference
    work = (
        (recipe, mode, partial(measure, recipe, mode, config, args, expected, results))
        for mode, recipe in itertools.product(args.modes, args.only)
    )
    return driver.run(results, work)


if __name__ == "__main__":
    sys.exit(main())
