"""Ranks that tests spawn, one of which goes wrong."""

import time

import torch
import torch.distributed as dist
from fsdp_models import CONFIGS, adamw, blocks, shard, train
from helpers import replace
from primary_weight_checks import Net, net
from ranks import device, join
from torch.distributed.device_mesh import DeviceMesh

# Over gloo: its collectives raise where a rank is missing, those of NCCL end the process.


def _fails(rank):
    if rank == 1:
        raise FloatingPointError("rank 1 gives up")


def _frozen_there(rank):
    model = net("fp8", False)
    model.mid.weight.requires_grad_(rank != 1)
    return model


# (rank, config) -> the model that it builds, or an error. Masters of quantized Parameters compare ranks themselves.
WRONG = {
    "other_config": lambda rank, config: blocks(replace(config, power_of_2_scales=rank == 1)),
    "other_shape": lambda rank, config: blocks(config, hidden=151 if rank == 1 else 150),
    "fails_early": lambda rank, config: _fails(rank) or blocks(config),
    "fails_later": lambda rank, config: blocks(config),
    "no_weights": lambda rank, config: blocks(None if rank == 1 else config),
    "zero_other_shape": lambda rank, config: adamw(
        net("fp8", False, make=lambda: Net(hidden=76 if rank == 1 else 75)), shard="zero1"
    ),
    "zero_other_lr": lambda rank, config: adamw(net("fp8", False), lr=0.02 if rank == 1 else 0.01, shard="zero1"),
    "zero_other_frozen": lambda rank, config: adamw(_frozen_there(rank), shard="zero1"),
    "zero_fails": lambda rank, config: _fails(rank) or adamw(net("fp8", False), shard="zero1"),
}


def go_wrong(rank: int, ranks: int, port: int, file: str, timeout: float) -> None:
    """Rank 1 builds another model, or fails; leaves what the rank raised each time and after how many seconds."""
    left = {}
    for name, build in WRONG.items():
        join(rank, ranks, port, seconds=timeout, name=name)
        start = time.monotonic()
        try:
            model = shard(build(rank, CONFIGS["fp8"]), DeviceMesh(device().type, list(range(ranks))))
            optimizer = adamw(model)
            train(model, optimizer, steps=1)
            _fails(rank)
            train(model, optimizer, steps=1)
            message = "nothing"
        except Exception as e:
            message = f"{type(e).__name__}: {e}"
        left[name] = (message, time.monotonic() - start)
        torch.save(left, file)
        dist.destroy_process_group()
