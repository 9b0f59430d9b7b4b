"""Weights from a trainer to an inference engine: what ranks gather of a model that FSDP2 shards, and how long it takes.

Llama-8B-shaped layers, fp32 shards, one process a GPU (NCCL; gloo with --smoke on a CPU). Every rank goes through all
tensors, one by one, and drops each before the next, as one hands them to an engine.
    bf16            each shard cast to bf16, `full_tensor()`
    bf16, quantized the same, then blockwise FP8 of the linear weights: what an FP8 engine does with bf16 weights
    quantized       `checkpoint.quantized_weights` of the converted model: the bytes that trained

    MiB       of the tensors that a rank gets
    ms        median of a pass over all weights, its first cast included; the slowest rank's
Writes benchmarks/results/refit_<device>.json and .md.

    python benchmarks/bench_refit.py [--layers 8] [--repeats 10] [--ranks 2]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bench_fsdp
import driver
import environment
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_model import SMOKE, Config
from report import Report
from timing import synchronize
from torch import nn
from traffic import mark, us_between

from torchao_blockwise import checkpoint, ops
from torchao_blockwise.formats import FP8_128X128

COLUMNS = ("way", "MiB", "of bf16", "ms", "x bf16")


def in_bf16(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.detach().bfloat16().full_tensor()


def in_bf16_then_quantized(model: nn.Module) -> Iterator[torch.Tensor]:
    """Of a linear weight, payload and scales."""
    for whole in in_bf16(model):
        if whole.dim() == 2:
            rowwise = ops.quantize(whole, FP8_128X128).rowwise
            assert rowwise is not None
            yield rowwise.qdata
            yield rowwise.scale
        else:
            yield whole


def quantized(model: nn.Module) -> Iterator[torch.Tensor]:
    for _, tensor in checkpoint.quantized_weights(model):
        yield tensor


# way: (recipe of the model, what yields its tensors)
WAYS: dict[str, tuple[str, Callable[[nn.Module], Iterator[torch.Tensor]]]] = {
    "bf16": ("bf16", in_bf16),
    "bf16, quantized": ("bf16", in_bf16_then_quantized),
    "quantized": ("fp8", quantized),
}


def measure(way: str, plan: bench_fsdp.Plan, repeats: int, device: torch.device) -> dict[str, float]:
    """Bytes and µs of one pass on this rank."""
    recipe, tensors_of = WAYS[way]
    model = bench_fsdp.build(recipe, plan, device)
    taken, times = 0, []
    for _ in range(repeats + 1):
        dist.barrier()
        synchronize(device)
        start = mark(device)
        taken = sum(tensor.nbytes for tensor in tensors_of(model))
        end = mark(device)
        synchronize(device)
        times.append(us_between(start, end))
    # The first one compiles and allocates.
    return {"bytes": taken, "us": statistics.median(times[1:])}


def run_rank(rank: int, plan: bench_fsdp.Plan, repeats: int, device_type: str, port: int) -> None:
    device = bench_fsdp.join(rank, plan.ranks, device_type, port)
    for way in WAYS:
        seen: list = [None] * plan.ranks
        dist.all_gather_object(seen, measure(way, plan, repeats, device))
        if rank == 0:
            environment.write_json(plan.result(way), seen)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    options = driver.parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--repeats", type=int, default=10, help="passes that are timed, default 10")
    options.add_argument("--ranks", type=int, help="GPUs; by default all, 2 processes on a CPU")
    args, device = driver.parse(options, argv)
    args.ranks = args.ranks or (torch.cuda.device_count() if device.type == "cuda" else 2)
    config = SMOKE if args.smoke else Config(layers=args.layers)
    report = Report("refit", device, COLUMNS, vars(args) | vars(config))
    with tempfile.TemporaryDirectory() as folder:
        plan = bench_fsdp.Plan((), "eager", config, 0, 0, args.ranks, Path(folder))
        mp.spawn(run_rank, args=(plan, args.repeats, device.type, environment.free_port()), nprocs=args.ranks)
        base: dict = {}
        for way in WAYS:
            seen = json.loads(plan.result(way).read_text())
            row = {"way": way, "MiB": seen[0]["bytes"] / 2**20, "ms": max(rank["us"] for rank in seen) / 1e3}
            base = base or row
            report.add({**row, "of bf16": row["MiB"] / base["MiB"], "x bf16": base["ms"] / row["ms"], "ranks": seen})
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
