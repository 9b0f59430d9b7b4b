"""Ranks that torchrun starts: FSDP2 shards the model over them, and they share the microbatches of a step."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import environment
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llm.config import RunConfig, UsageError


def started_by_torchrun() -> bool:
    """Whether this process is one of several, or the only one, that share a run."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """In a process that torchrun started: joins the others, until the block ends. Gives the device of this rank."""
    if not started_by_torchrun():
        yield device
        return
    if device.type == "cuda":
        os.environ.update(environment.NO_MULTICAST)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # FSDP2 hands out views of its buffers, which autograd remarks on once a step.
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def count() -> int:
    """How many ranks there are; 0 in a process by itself, whose model is not sharded."""
    return dist.get_world_size() if dist.is_initialized() else 0


def number() -> int:
    """Of this rank, 0 in a process by itself."""
    return dist.get_rank() if dist.is_initialized() else 0


def check(config: RunConfig, *, saves: bool) -> None:
    """Raises UsageError for what ranks cannot share."""
    if config.grad_accumulation % max(1, count()):
        remedy = f"--grad-accumulation {count()}, or a multiple of it"
        raise UsageError(f"{count()} ranks cannot share {config.grad_accumulation} microbatches a step; {remedy}")
    if saves and count():
        raise UsageError("--checkpoint-every and --resume: not with torchrun; leave them out")
    if config.bf16_steps and count():
        raise UsageError("--bf16-steps: not with torchrun; leave it out")
    if config.tied_head and count():
        raise UsageError("--tied-head: not with torchrun; leave it out")


def own(items: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Those that fall to this rank: every n-th, of n ranks."""
    return items[number() :: max(1, count())]


def shard(model: nn.Module) -> None:
    """Shard each block, and then the rest, as trainers do: what is not quantized is gathered in bf16; fp32 sums."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """`x`, which becomes the sum over ranks."""
    if count() > 1:
        dist.all_reduce(x)
    return x
