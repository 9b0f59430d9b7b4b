"""Writers over ranks: what collectives, optimizers that share their work and compiled steps write is what is read next.

Each is compared with a fresh conversion of the same values, bit for bit. FSDP2's are in `fsdp_life_checks.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_models import CONFIGS, values
from helpers import assert_same, forward_backward
from ranks import device
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torchao.quantization import quantize_

# --- writers: all ranks call them; weights of whole models stay alike on all ranks, as training keeps them ------------


def broadcast_wrapper(model):
    """On `p.data`, as optimizers do it: the master weight itself is handed to the collective."""
    for p in model.parameters():
        if dist.get_rank() == 0:
            values(p).mul_(3)
        dist.broadcast(p.data, src=0)


def all_reduce(model):
    for p in model.parameters():
        dist.all_reduce(p.data)


def send(model):
    for p in model.parameters():
        if dist.get_rank() == 0:
            values(p).mul_(3)
            dist.send(p.data, dst=1)
        else:
            dist.recv(p.data, src=0)


def zero_redundancy(model):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


WRITERS = {write.__name__: write for write in (broadcast_wrapper, all_reduce, send, zero_redundancy)}


def whole(recipe: str) -> nn.Sequential:
    """Two layers, and nothing that a compiler would round otherwise."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)).to(device())
    quantize_(model, CONFIGS[recipe])
    return model


def is_read(write: str, recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, fresh = whole(recipe), whole(recipe)
    x = torch.randn(30, 128, generator=torch.Generator().manual_seed(5)).to(device())
    if compiled:
        model.compile()
    before = [values(p).clone() for p in model.parameters()]
    forward_backward(model, x)
    WRITERS[write](model)
    assert not any(torch.equal(a, values(p)) for a, p in zip(before, model.parameters()))
    with torch.no_grad():
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
            values(p).copy_(values(q))
    assert_same(forward_backward(model, x), forward_backward(fresh, x))


_BOTH = ("fp8", "nvfp4")
_CASES = [[(write, _BOTH[(index + tier) % 2], False) for index, write in enumerate(WRITERS)] for tier in range(2)]
# (what writes, recipe, whether the model is compiled)
CASES = {2: ([*_CASES[0], ("zero_redundancy", "fp8", True)], [*_CASES[1], ("broadcast_wrapper", "fp8", True)])}


def start(rank: int, ranks: int):
    return is_read
