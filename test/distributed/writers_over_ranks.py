"""Collectives and optimizers that share their work write master weights as they write plain ones.

What was written is read next, whoever wrote it: test_writers_and_readers.py. FSDP2's writers are in
`fsdp_life_checks.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_models import CONFIGS, values
from helpers import mlp
from ranks import device
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal


def broadcast(model):
    """On `p.data`, as optimizers do it: the master weight itself is handed to the collective."""
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def all_reduce(model):
    for p in model.parameters():
        dist.all_reduce(p.data)


def send(model):
    for p in model.parameters():
        dist.send(p.data, dst=1) if dist.get_rank() == 0 else dist.recv(p.data, src=0)


def zero_redundancy(model):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def writes_as_to_plain_weights(write) -> None:
    model, plain, before = (mlp(config, seed=dist.get_rank()).to(device()) for config in (CONFIGS["fp8"], None, None))
    assert isinstance(model[0].weight, MasterWeightTensor)
    for m in (model, plain):
        write(m)
    for p, q, old in zip(model.parameters(), plain.parameters(), before.parameters(), strict=True):
        assert_bitwise_equal(values(p), values(q))
        # The first rank's values are what is sent.
        assert dist.get_rank() == 0 or not torch.equal(q, old)


WRITERS = {write.__name__: write for write in (broadcast, all_reduce, send, zero_redundancy)}
CASES = {2: ([(name,) for name in WRITERS], [])}


def start(rank: int, ranks: int):
    return lambda name: writes_as_to_plain_weights(WRITERS[name])
