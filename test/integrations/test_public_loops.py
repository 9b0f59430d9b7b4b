"""Optimizers of public training loops on converted models: the values of plain weights."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, NVFP4, assert_same, mlp

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")


@torch.compile(fullgraph=True, backend="aot_eager")
def update(weights, gradients, momentum):
    momentum.lerp_(gradients, 0.05)
    weights.sub_(0.02 * momentum + 0.002 * weights * (momentum * weights >= 0))


@torch.no_grad()
def step_on_a_stack(matrices, momentum) -> None:
    """As nanochat steps Muon: one compiled call for the stack of all matrices of a shape, which are then gathered."""
    stack = torch.stack(matrices)
    update(stack, torch.stack([p.grad for p in matrices]), momentum)
    torch._foreach_copy_(matrices, list(stack.unbind(0)))


@torch.no_grad()
def step_on_rows(p, rows, optimizer) -> None:
    """As nanochat steps AdamW: compiled, on the rows of each rank, which are then gathered."""
    for part, grad in zip(rows, p.grad.chunk(len(rows))):
        part.grad = grad
    torch.compile(optimizer.step, backend="aot_eager")()
    p.copy_(torch.cat([part.detach() for part in rows]))


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_steps_of_nanochat(config):
    results = []
    for recipe in (None, config):
        model = mlp(recipe, features=(64, 64, 64))
        matrices, momentum = [model[0].weight, model[2].weight], torch.zeros(2, 64, 64)
        rows = [torch.nn.Parameter(part.clone()) for part in matrices[0].detach().chunk(2)]
        optimizer = torch.optim.AdamW(rows, lr=1e-2)
        torch.manual_seed(1)
        for _ in range(2):
            for p in matrices:
                p.grad = torch.randn(p.shape)
            step_on_a_stack(matrices, momentum)
            step_on_rows(matrices[0], rows, optimizer)
        results.append([getattr(p, "hp", p).detach() for p in matrices])
    assert_same(*results)
