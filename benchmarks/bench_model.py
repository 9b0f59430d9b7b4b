"""A Llama-8B-shaped stack, one whole training step: tokens/s, peak memory, and where the time goes.

Layers of Llama 3 8B (grouped-query attention, SwiGLU), without embedding and head, bf16 weights, fused AdamW in bf16.
Each recipe runs eager and compiled (layer by layer), without and with activation checkpointing of each layer; all of
them eager first. Checks
first that the output is bf16's within the recipe's error. Memory is the peak of a step, all it holds counted. The split
is of device time by kernel, from torch.profiler over one step; `--kernels` prints its longest kernels.
Writes benchmarks/results/model_<layers>_layers_<device>.json and .md.

    python benchmarks/bench_model.py [--layers 32 --tokens 4096] [--only fp8 bf16] [--modes eager] [--kernels 20]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import peers
import report
import torch
import torch.nn.functional as F
from errors import relative_error
from llm.model import MLP, RMSNorm, rotary, rotate
from report import Report
from timing import Timing, reason, synchronize
from torch import nn
from torch.utils.checkpoint import checkpoint

RECIPES = ("bf16", "fp8", "torchao", "torchao_tensorwise", "torchao_rowwise", "nvfp4")
OURS = ("fp8", "nvfp4")
MODES = ("eager", "compiled")
COLUMNS = ("recipe", "mode", "checkpointing", "tokens/s", "x bf16", "ms a step", "peak GiB", "error")
# Kernels by what their names hold; the first that fits.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|softmax",
    "optimizer": r"adam|multi_tensor",
    "products": r"gemm|matmul|nvjet|xmma|cutlass|_mm\b|::mm|addmm|cublas|wgmma",
    "quantise": r"quant|amax|fp8|nvfp4|float8",
    "transpose": r"transpose",
    "compiled": r"^triton_",
}
# Of the whole stack: errors of layers add up.
_BUDGET = 0.5


@dataclass(frozen=True)
class Config:
    """The shape of the stack."""

    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 8
    seq_len: int = 4096


SMOKE = Config(dim=128, hidden=256, heads=4, kv_heads=2, layers=2, seq_len=32)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; query, key and value come from one GEMM."""

    def __init__(self, config: Config):
        super().__init__()
        self.widths = [h * config.dim // config.heads for h in (config.heads, config.kv_heads, config.kv_heads)]
        self.head_dim = config.dim // config.heads
        self.qkv = nn.Linear(config.dim, sum(self.widths), bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [B, S, dim]; cos, sin: [S, head_dim]."""
        heads = [p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.qkv(x).split(self.widths, dim=-1)]
        q, k, v = heads  # [B, heads, S, head_dim]
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        return self.output(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [B, S, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Decoder layers one after the other."""

    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        cos, sin = rotary(config.seq_len, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, S, dim]."""
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return x


def build(config: Config, recipe: str, device: torch.device) -> Stack:
    """The stack with the same weights for every recipe; raises peers.Unavailable."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(config)
    return peers.convert(model.to(torch.bfloat16), recipe, device)


class Trainer:
    """Steps of one model on fixed random input."""

    def __init__(self, model: Stack, config: Config, tokens: int, device: torch.device):
        self.model = model
        generator = torch.Generator(device).manual_seed(1)
        shape = (max(1, tokens // config.seq_len), min(tokens, config.seq_len), config.dim)
        self.x, self.dy = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        # As it would behind an embedding.
        self.x.requires_grad_()
        self.tokens = shape[0] * shape[1]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None
        self.model(self.x).backward(self.dy)
        self.optimizer.step()


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


def kernels_of(trainer: Trainer, device: torch.device) -> list[tuple[str, float]]:
    """(name, device µs) of each kernel of one step, operators and host µs on a CPU, the longest first."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]) as profile:
        trainer.step()
        synchronize(device)
    times: dict[str, float] = {}
    for event in profile.key_averages():
        if on_gpu and (
            event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False)
        ):
            continue
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us > 0:
            times[event.key] = times.get(event.key, 0.0) + us
    return sorted(times.items(), key=lambda item: -item[1])


def split_of(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """{kind: share of the time}; "other" is what fits no kind."""
    total = sum(us for _, us in kernels) or 1.0
    shares = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, us in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        shares[kind] += us / total
    return shares


def measure(
    recipe: str, mode: str, config: Config, args: argparse.Namespace, expected: torch.Tensor, results: Report
) -> None:
    """Add the rows of one recipe in one mode."""
    device = results.device
    model = build(config, recipe, device)
    trainer = Trainer(model, config, args.tokens, device)
    with torch.no_grad():
        error = relative_error(model(trainer.x), expected)
    if not error <= _BUDGET:
        results.leave_out(recipe, mode, f"WRONG, relative error {error:.2g}")
        return
    if mode == "compiled":
        torch._dynamo.reset()
        for i, layer in enumerate(model.layers):
            model.layers[i] = peers.compile_model(layer, device)
    for model.checkpointing in args.checkpointing:
        where = f"{mode}, checkpointing {'on' if model.checkpointing else 'off'}"
        try:
            timing, peak = time_steps(trainer, device, args.steps)
            kernels = kernels_of(trainer, device)
        except Exception as failure:
            results.leave_out(recipe, where, reason(failure))
            trainer.optimizer.zero_grad(set_to_none=True)
            continue
        base = next((r for r in results.rows if r["recipe"] == "bf16" and r["where"] == where), None)
        shares = split_of(kernels)
        results.add(
            {
                "recipe": recipe,
                "mode": mode,
                "checkpointing": "on" if model.checkpointing else "off",
                "tokens/s": trainer.tokens / timing.us * 1e6,
                "x bf16": base["us"] / timing.us if base else None,
                "ms a step": timing.us / 1e3,
                "peak GiB": None if peak is None else peak / 2**30,
                "error": error,
                **{f"{kind} %": 100 * share for kind, share in shares.items()},
                "where": where,
                "us": timing.us,
                "timing": timing._asdict(),
                "kernels": [{"name": name, "us": us} for name, us in kernels[:40]],
            }
        )
        for name, us in kernels[: args.kernels]:
            print(f"    {us:10.1f} us  {name[:100]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--tokens", type=int, default=8192, help="in a step, in sequences of 4096")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES[:-1]), help="only these recipes")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--kernels", type=int, default=0, help="print the longest kernels of each row")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny stack, on a CPU where there is no GPU: does it run?"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(2, "bench_model: needs a CUDA GPU; none found (--smoke tries the script out on a CPU)\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SMOKE if args.smoke else Config(layers=args.layers)
    if args.smoke:
        args.tokens, args.steps = 2 * config.seq_len, 2
    # bf16 first, with which the others are compared, then ours; eager first, because compiling takes long: a run that
    # is cut short has the rows that matter.
    args.only = sorted(args.only, key=lambda recipe: (recipe != "bf16", recipe not in OURS, RECIPES.index(recipe)))
    args.modes = sorted(args.modes, key=MODES.index)
    columns = [*COLUMNS, *(f"{kind} %" for kind in (*KINDS, "other"))]
    results = Report(f"model_{config.layers}_layers", device, columns, report.plain(vars(args)) | vars(config))
    args.checkpointing = [state == "on" for state in args.checkpointing]
    reference = build(config, "bf16", device)
    with torch.no_grad():
        expected = reference(Trainer(reference, config, args.tokens, device).x)
    del reference
    for mode, recipe in itertools.product(args.modes, args.only):
        try:
            measure(recipe, mode, config, args, expected, results)
        except peers.Unavailable as why:
            results.leave_out(recipe, mode, str(why))
        except Exception as error:
            results.leave_out(recipe, mode, reason(error))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.write(args.out)
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
