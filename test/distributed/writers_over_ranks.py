"""Writers over ranks: what collectives, optimizers that share their work and compiled steps write is what is read next.

Each is compared with a fresh conversion of the same values, bit for bit. FSDP2's are in `fsdp_life_checks.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers import FP8, NVFP4, replace
from ranks import device
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, _compat

RECIPES = {"fp8": replace(FP8, backend="reference"), "nvfp4": replace(NVFP4, backend="reference")}


def local(p: torch.Tensor) -> torch.Tensor:
    return _compat.local_of(p.detach())


def values(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, plain and the very memory."""
    part = local(p)
    return part.hp if isinstance(part, MasterWeightTensor) else part


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


# --- readers ----------------------------------------------------------------------------------------------------------


def whole(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)).to(device())
    quantize_(model, config)
    return model


def outcome(run, model):
    x = torch.randn(30, 128, generator=torch.Generator().manual_seed(5)).to(device()).requires_grad_()
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(local(p.grad) for p in model.parameters())]


def case_of(write, recipe: str, compiled: bool = False):
    def check():
        torch._dynamo.reset()
        model = whole(RECIPES[recipe])
        run = torch.compile(model) if compiled else model
        outcome(run, model)
        before = [values(p).clone() for p in model.parameters()]
        write(model)
        assert not any(torch.equal(a, values(p)) for a, p in zip(before, model.parameters()))
        fresh = whole(RECIPES[recipe])
        with torch.no_grad():
            for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
                values(p).copy_(values(q))
        for a, b in zip(outcome(run, model), outcome(fresh, fresh), strict=True):
            assert torch.equal(a, b)

    return check


_ALL = {write.__name__: write for write in (broadcast_wrapper, all_reduce, send, zero_redundancy)}
_DEFAULT = [(name, tuple(RECIPES)[index % 2], False) for index, name in enumerate(_ALL)]
_DEFAULT.append(("zero_redundancy", "fp8", True))
_SLOW = [(name, tuple(RECIPES)[1 - index % 2], False) for index, name in enumerate(_ALL)]
_SLOW.append(("broadcast_wrapper", "fp8", True))
# (what writes, recipe, whether the model is compiled)
CASES = {2: (_DEFAULT, _SLOW)}


def start(rank: int, ranks: int):
    return lambda name, recipe, is_compiled: case_of(_ALL[name], recipe, is_compiled)()
