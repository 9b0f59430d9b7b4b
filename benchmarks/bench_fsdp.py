"""A Llama-8B-shaped stack that FSDP2 shards over the GPUs of this machine: gathered bytes, time, memory, scale sync.

One process a GPU (NCCL; gloo with --smoke on a CPU), blocks and root fully sharded, fp32 shards, bf16 compute
(`MixedPrecisionPolicy(param_dtype=bf16)`: gradients are reduced in bf16), fused AdamW, 8192 tokens a GPU. Recipes:
    bf16                    weights travel in bf16
    torchao_bf16_gather     torchao's float8 tensorwise, quantized after the gather
    torchao_fp8_gather      the same, quantized before it, scales precomputed after each optimizer step
    fp8, nvfp4              ours

    gathered MiB   counted: outputs of all `torch.distributed` all-gathers into one tensor, which FSDP2 calls by these
                   names, over the timed steps; both passes gather
    ms a step      median between the ends of steps, without a pause between them; the slowest rank's
    tokens/s       of all ranks
    peak GiB       most bytes that the model, its optimizer and a step have allocated on a rank
    sync ms        of scales and, ours, of payload: events around it on the GPU, a wait for slower ranks included
    reduce ms      of that the MAX all-reduce of ours, the exchange of scales
    sync %, reduce %   of a step
    loss           mean over ranks of the last step, of output against a fixed random target
    off            its distance from bf16's, as a share of what bf16 learned in these steps

A recipe that fails is named below the table with its reason, and the others go on in fresh processes. What is
interrupted (SIGINT) writes the rows that it has.
Writes benchmarks/results/fsdp_<device>.json and .md, with --compile fsdp_compiled_<device>.

    python benchmarks/bench_fsdp.py [--layers 4 --tokens 8192 --steps 20] [--compile] [--only bf16 fp8] [--ranks 2]
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import driver
import environment
import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_model import SMOKE, Config, Stack, Trainer, parser
from errors import Unavailable, reason
from report import Report
from timing import Timing, synchronize
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from traffic import Observed, mark, us_between

OURS = ("fp8", "nvfp4")
GATHERS = {"torchao_bf16_gather": False, "torchao_fp8_gather": True}
RECIPES = ("bf16", *GATHERS, *OURS)
COLUMNS = (
    *("recipe", "mode", "gathered MiB", "of bf16", "ms a step", "x bf16", "tokens/s", "peak GiB"),
    *("sync ms", "sync %", "reduce ms", "reduce %", "loss", "off"),
)
# Steps before those that are timed: compilers, allocators and caches settle.
_WARM_UP = 3
# Of what bf16 learned, the share by which a recipe's loss may differ; more is reported as wrong.
_BUDGET = {"nvfp4": 0.4}
_FP8_BUDGET = 0.1
_TIMEOUT = {"cuda": datetime.timedelta(minutes=5), "cpu": datetime.timedelta(minutes=1)}


@dataclass(frozen=True)
class Plan:
    """What every rank is told: the recipes to train, a row each, and how."""

    recipes: tuple[str, ...]
    mode: str
    config: Config
    tokens: int
    steps: int
    ranks: int
    folder: Path

    def result(self, recipe: str) -> Path:
        """Where the ranks leave what they saw of `recipe`, or why they saw nothing."""
        return self.folder / f"{recipe}.json"


# --- one rank ---------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, recipe: str, device: torch.device) -> nn.Module:
    """The model trained by `recipe`, not yet sharded; raises peers.Unavailable."""
    if recipe not in GATHERS:
        return peers.convert(model, recipe, device)
    if device.type == "cuda":
        peers.need_capability(device, (8, 9), at_least=True)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    on_cpu = device.type == "cpu"
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=GATHERS[recipe], emulate=on_cpu)
    return convert_to_float8_training(model, config=config)


def build(recipe: str, plan: Plan, device: torch.device) -> nn.Module:
    """The sharded stack, with the same weights for every recipe."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(plan.config)
    model = convert(model, recipe, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for i, layer in enumerate(model.layers):
        if plan.mode == "compiled":
            model.layers[i] = layer = peers.compile_model(layer, device)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Learner(Trainer):
    """Steps towards a random target, which is what a trainer has for dy."""

    def backward(self) -> torch.Tensor:
        """Forward and backward; returns the loss."""
        loss = (self.model(self.x).float() - self.dy).square().mean()
        loss.backward()
        return loss.detach()


def measure(recipe: str, plan: Plan, device: torch.device) -> dict:
    """What this rank saw of `recipe`: a step's figures, JSON-able."""
    observed = Observed(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    trainer = Learner(build(recipe, plan, device), plan.config, plan.tokens, device, dist.get_rank())
    sync = None
    if GATHERS.get(recipe):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        sync = observed.timed(precompute_float8_dynamic_scale_for_fsdp, "syncs")

    def step() -> torch.Tensor:
        loss = trainer.step()
        if sync:
            sync(trainer.model)
        return loss

    with observed.watching():
        losses = [step() for _ in range(_WARM_UP)]
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        observed.clear()
        dist.barrier()
        marks = [mark(device)]
        for _ in range(plan.steps):
            losses.append(step())
            marks.append(mark(device))
        synchronize(device)
    # Alone, a rank has all it needs, and newer FSDP2 gathers nothing.
    if not observed.gathers and plan.ranks > 1:
        raise RuntimeError("no all-gather was seen; count what this version of FSDP2 calls")
    trained = torch.stack(losses)
    if not trained.isfinite().all():
        raise RuntimeError(f"the loss is not finite: {trained.tolist()}")
    timing = Timing.of([us_between(*span) for span in itertools.pairwise(marks)])

    def us_a_step(spans):
        return sum(us_between(*span) for span in spans) / plan.steps if spans else None

    return {
        "gathers": observed.gathers / plan.steps,
        "gathered bytes": observed.gathered_bytes / plan.steps,
        "us": timing.us,
        "timing": timing._asdict(),
        "tokens": trainer.tokens,
        "peak": torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None,
        "syncs": len(observed.syncs) / plan.steps,
        "sync us": us_a_step(observed.syncs),
        "reduces": len(observed.reduces) / plan.steps,
        "reduce us": us_a_step(observed.reduces),
        "losses": trained.tolist(),
    }


def join(rank: int, ranks: int, device_type: str, port: int) -> torch.device:
    """Join the process group; the device of this rank."""
    on_gpu = device_type == "cuda"
    device = torch.device(device_type, rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        os.environ.update(environment.NO_MULTICAST)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    # FSDP2 hands out views of its buffers, which autograd remarks on once a step.
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks,
        timeout=_TIMEOUT[device_type], device_id=device if on_gpu else None,
    )  # fmt: skip
    return device


def run_rank(rank: int, plan: Plan, device_type: str, port: int) -> None:
    """Train all recipes that have left no result yet; ends at the first that fails, whose reason it leaves."""
    device = join(rank, plan.ranks, device_type, port)
    # All ranks agree on what is left before any of them writes.
    left = [recipe for recipe in plan.recipes if not plan.result(recipe).exists()]
    dist.barrier()
    for recipe in left:
        try:
            seen: list = [None] * plan.ranks
            result: dict[str, Any] = {"ranks": seen}
            dist.all_gather_object(seen, measure(recipe, plan, device))
        except Unavailable as why:
            result = {"why": str(why)}
        except Exception as error:
            # The first rank that fails knows why; the others only lose it.
            if not plan.result(recipe).exists():
                environment.write_json(plan.result(recipe), {"why": f"rank {rank}: {reason(error)}"})
            traceback.print_exc()
            # Not by way of the interpreter, which could wait for collectives that never end.
            os._exit(1)
        if rank == 0:
            environment.write_json(plan.result(recipe), result)
        if plan.mode == "compiled":
            torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


# --- all ranks --------------------------------------------------------------------------------------------------------


def run_all(plan: Plan, device: torch.device, results: Report) -> None:
    """Run the plan, in as many rounds of processes as recipes bring them down, and add rows as they come."""
    waiting = list(plan.recipes)

    def collect() -> None:
        while waiting and plan.result(waiting[0]).exists():
            recipe = waiting.pop(0)
            add_row(recipe, plan.mode, json.loads(plan.result(recipe).read_text()), results)

    while waiting:
        left, why = len(waiting), "left no result"
        try:
            context = mp.spawn(
                run_rank, args=(plan, device.type, environment.free_port()), nprocs=plan.ranks, join=False
            )
            while not context.join(timeout=1):
                collect()
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            why = reason(error)
        collect()
        # A recipe whose processes die without a word is tried once more if others of its round came before it.
        if len(waiting) == left:
            environment.write_json(plan.result(waiting[0]), {"why": why})
            collect()


def add_row(recipe: str, mode: str, result: dict, results: Report) -> None:
    """The row of `recipe` from what its ranks saw, or the reason why there is none."""
    if "why" in result:
        results.leave_out(recipe, mode, result["why"])
        return
    seen = result["ranks"]

    def most(name: str, unit: float) -> float | None:
        return max((rank[name] / unit for rank in seen if rank[name] is not None), default=None)

    us = max(rank["us"] for rank in seen)
    row: dict[str, Any] = {
        "recipe": recipe,
        "mode": mode,
        "gathered MiB": most("gathered bytes", 2**20),
        "ms a step": us / 1e3,
        "tokens/s": sum(rank["tokens"] for rank in seen) / us * 1e6,
        "peak GiB": most("peak", 2**30),
        "sync ms": most("sync us", 1e3),
        "sync %": most("sync us", us / 100),
        "reduce ms": most("reduce us", 1e3),
        "reduce %": most("reduce us", us / 100),
        "us": us,
        "losses": [sum(losses) / len(seen) for losses in zip(*(rank["losses"] for rank in seen))],
        "ranks": seen,
    }
    row["loss"] = row["losses"][-1]
    base = next((r for r in (row, *results.rows) if (r["recipe"], r["mode"]) == ("bf16", mode)), None)
    off = None
    if base:
        first, *_, last = base["losses"]
        off = abs(row["loss"] - last) / abs(first - last)
        row |= {"x bf16": base["us"] / us, "off": off}
        if base["gathered MiB"]:
            row["of bf16"] = row["gathered MiB"] / base["gathered MiB"]
    results.add(row)
    if off is not None and off > _BUDGET.get(recipe, _FP8_BUDGET):
        results.leave_out(recipe, mode, f"WRONG, its loss is off by {off:.2g} of what bf16 learned")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, RECIPES, RECIPES, 4, 20)
    options.add_argument("--ranks", type=int, help="GPUs; by default all, 2 processes on a CPU")
    options.add_argument("--compile", action="store_true", help="torch.compile each layer")
    args, device = driver.parse(options, argv)
    args.ranks = args.ranks or (torch.cuda.device_count() if device.type == "cuda" else 2)
    config = SMOKE if args.smoke else Config(layers=args.layers)
    if args.smoke:
        args.tokens, args.steps = 2 * config.seq_len, 3
    # bf16 first: the others are compared with it.
    recipes = tuple(sorted(args.only, key=lambda recipe: recipe != "bf16"))
    mode, name = ("compiled", "fsdp_compiled") if args.compile else ("eager", "fsdp")
    results = Report(name, device, COLUMNS, vars(args) | vars(config))
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(recipes, mode, config, args.tokens, args.steps, args.ranks, Path(folder))
        return driver.run(results, [(("all",), mode, partial(run_all, plan, device, results))])


if __name__ == "__main__":
    sys.exit(main())
