"""A Llama-8B-shaped stack that FSDP2 shards over the GPUs of this machine: gathered bytes, time, memory, scale sync.

One process a GPU (NCCL; gloo with --smoke on a CPU), blocks and root fully sharded, fp32 shards, bf16 compute
(`MixedPrecisionPolicy(param_dtype=bf16)`: gradients are reduced in bf16), fused AdamW, 8192 tokens a GPU. Recipes:
    bf16                    weights travel in bf16
    torchao_bf16_gather     torchao's float8 tensorwise, quantized after the gather
    torchao_fp8_gather      the same, quantized before it, scales precomputed after each optimizer step
    fp8, fp8_128x128, nvfp4  ours; with these `grad_weight_blocks`; fused_once: as in bench_model.py

    gathered MiB   counted outputs of all-gathers, in both passes
    ms a step      median of the slowest rank; tokens/s: of all ranks; peak GiB: of the rank with most
    sync ms        of scales and, ours, of payload, a wait for slower ranks included; reduce ms: of that the all-reduce
    loss           mean over ranks of the last step, of output against a fixed random target
    off            its distance from bf16's, as a share of what bf16 learned in these steps

Each recipe trains in separate processes. The results of --compile have separate files, fsdp_compiled_<device>.

    python benchmarks/bench_fsdp.py [--layers 4 --tokens 8192 --steps 20] [--compile] [--only bf16 fp8] [--ranks 2]
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bench_model
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_model import SMOKE, Config, Stack, Trainer
from common import driver, environment, peers
from common.errors import Unavailable
from common.report import Report
from common.timing import Timing, mark, synchronize, us_between
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao import float8

from torchao_blockwise.distributed.fsdp import Root

GATHERS = {"torchao_bf16_gather": False, "torchao_fp8_gather": True}
RECIPES = ("bf16", *GATHERS, "fp8", "fp8_128x128", "fp8_128x128_fused_once", "nvfp4")
COLUMNS = (
    *("recipe", "mode", "gathered MiB", "of bf16", "ms a step", "x bf16", "tokens/s", "peak GiB"),
    *("sync ms", "reduce ms", "loss", "off"),
)
# Steps before those that are timed: compilers, allocators and caches settle.
_WARM_UP = 3
# Of what bf16 learned, the share by which a recipe's loss may differ; more is reported as wrong.
_BUDGET = {"nvfp4": 0.4}
_FP8_BUDGET = 0.1
_TIMEOUT = {"cuda": datetime.timedelta(minutes=5), "cpu": datetime.timedelta(minutes=1)}


@contextlib.contextmanager
def observing(device: torch.device) -> Iterator[dict[str, list]]:
    """In the block: {"gathered": bytes of all-gathers; "sync", "reduce": spans of syncs of scales, of all-reduces}."""
    seen: dict[str, list] = {"gathered": [], "sync": [], "reduce": []}

    def counted(gather: Callable) -> Callable:
        def call(output_tensor, *args, **kwargs):
            seen["gathered"].append(output_tensor.nbytes)
            return gather(output_tensor, *args, **kwargs)

        return call

    def timed(what: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = mark(device)
            result = function(*args, **kwargs)
            seen[what].append((start, mark(device)))
            return result

        return call

    # Names of one release call each other's implementation, not each other, so nothing counts twice.
    gathers = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    replaced = [(dist, name, counted(getattr(dist, name))) for name in gathers]
    replaced.append((dist, "all_reduce", timed("reduce", dist.all_reduce)))
    # What `sync_weight_scales` and the hook of a root's forward pass share, and torchao's.
    for owner, name in ((Root, "sync"), (float8, "precompute_float8_dynamic_scale_for_fsdp")):
        replaced.append((owner, name, timed("sync", getattr(owner, name))))
    with contextlib.ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield seen


# --- one rank ---------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, recipe: str, device: torch.device) -> nn.Module:
    """The model trained by `recipe`, not yet sharded; raises peers.Unavailable."""
    if recipe not in GATHERS:
        return bench_model.convert(model, recipe, device)
    if device.type == "cuda":
        peers.need_capability(device, (8, 9), at_least=True)
    on_cpu = device.type == "cpu"
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=GATHERS[recipe], emulate=on_cpu)
    return float8.convert_to_float8_training(model, config=config)


def build(recipe: str, config: Config, compiled: bool, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(config)
    model = convert(model, recipe, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for i, layer in enumerate(model.layers):
        if compiled:
            model.layers[i] = layer = peers.compile_model(layer, device)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Learner(Trainer):
    """Steps towards a random target, which is what a trainer has for dy."""

    def backward(self) -> torch.Tensor:
        loss = (self.model(self.x).float() - self.dy).square().mean()
        loss.backward()
        return loss.detach()


def measure(recipe: str, config: Config, args: Namespace, device: torch.device) -> dict:
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    trainer = Learner(build(recipe, config, args.compile, device), config, args.tokens, device, dist.get_rank())

    def step() -> torch.Tensor:
        loss = trainer.step()
        if GATHERS.get(recipe):
            float8.precompute_float8_dynamic_scale_for_fsdp(trainer.model)
        return loss

    with observing(device) as seen:
        losses = [step() for _ in range(_WARM_UP)]
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for observed in seen.values():
            observed.clear()
        dist.barrier()
        marks = [mark(device)]
        for _ in range(args.steps):
            losses.append(step())
            marks.append(mark(device))
        synchronize(device)
    # Alone, a rank has all it needs, and newer FSDP2 gathers nothing.
    if not seen["gathered"] and args.ranks > 1:
        raise RuntimeError("no all-gather was seen; count what this version of FSDP2 calls")
    trained = torch.stack(losses)
    if not trained.isfinite().all():
        raise RuntimeError(f"the loss is not finite: {trained.tolist()}")
    timing = Timing.of([us_between(*span) for span in itertools.pairwise(marks)])

    def us_a_step(spans):
        return sum(us_between(*span) for span in spans) / args.steps if spans else None

    return {
        "gathered bytes": sum(seen["gathered"]) / args.steps,
        "us": timing.us,
        "timing": timing._asdict(),
        "tokens": trainer.tokens,
        "peak": torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None,
        "syncs": len(seen["sync"]) / args.steps,
        "sync us": us_a_step(seen["sync"]),
        "reduces": len(seen["reduce"]) / args.steps,
        "reduce us": us_a_step(seen["reduce"]),
        "losses": trained.tolist(),
    }


def join(rank: int, ranks: int, device_type: str, folder: Path) -> torch.device:
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
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks,
        timeout=_TIMEOUT[device_type], device_id=device if on_gpu else None,
    )  # fmt: skip
    return device


def run_rank(rank: int, recipe: str, config: Config, args: Namespace, device_type: str, folder: Path) -> None:
    """Train; the first rank writes the figures of all to seen.json in `folder`."""
    device = join(rank, args.ranks, device_type, folder)
    seen: list = [None] * args.ranks
    dist.all_gather_object(seen, measure(recipe, config, args, device))
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    dist.barrier()
    # A thread of gloo that outlives its group may abort the process while the interpreter ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# --- all ranks --------------------------------------------------------------------------------------------------------


def run_recipe(recipe: str, mode: str, config: Config, args: Namespace, results: Report) -> None:
    """Train `recipe` on all ranks, and add its row; raises Unavailable with the reason of the first rank that fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run_rank, (recipe, config, args, results.device.type, Path(folder)), nprocs=args.ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            # The last line of the rank's traceback.
            raise Unavailable(str(error).strip().splitlines()[-1]) from None
        add_row(recipe, mode, json.loads(Path(folder, "seen.json").read_text()), results)


def add_row(recipe: str, mode: str, seen: list[dict], results: Report) -> None:
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
        "reduce ms": most("reduce us", 1e3),
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
    options = driver.parser(__doc__, only=(RECIPES, RECIPES))
    driver.add_numbers(options, layers=4, tokens=8192, steps=20)
    options.add_argument("--ranks", type=int, help="GPUs; by default all, 2 processes on a CPU")
    options.add_argument("--compile", action="store_true", help="torch.compile each layer")
    args, device = driver.parse(options, argv)
    args.ranks = args.ranks or (torch.cuda.device_count() if device.type == "cuda" else 2)
    config = SMOKE if args.smoke else Config(layers=args.layers)
    if args.smoke:
        args.tokens, args.steps = 2 * config.seq_len, 3
    mode, name = ("compiled", "fsdp_compiled") if args.compile else ("eager", "fsdp")
    results = Report(name, device, COLUMNS, vars(args) | vars(config))
    # bf16 first: the others are compared with it.
    recipes = sorted(args.only, key=lambda recipe: recipe != "bf16")
    return driver.run(results, [(r, mode, partial(run_recipe, r, mode, config, args, results)) for r in recipes])


if __name__ == "__main__":
    sys.exit(main())
