"""SwiGLU experts, their tokens, and the operations that they are made of, for tests."""

from __future__ import annotations

import pytest
import torch
from helpers import RECIPES
from named_results import assert_same as assert_same
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, ops
from torchao_blockwise.nn import SwiGLUExperts, grouped_linear
from torchao_blockwise.testing import random_tensor

recipes = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
DIM, HIDDEN = 64, 96
# Ends of the groups, and tokens.
ROUTINGS = {
    "ragged": ((5, 140, 150), 150),
    "empty": ((0, 7, 7, 30, 30), 30),
    "one_expert": ((0, 0, 130), 130),
    "tail": ((4, 9, 12), 40),
    "nobody": ((0, 0), 6),
    "one_token": ((0, 1), 1),
    "no_token": ((0, 0, 0), 0),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def experts_of(config, count: int, dim: int = DIM, hidden: int = HIDDEN, dtype=torch.float32) -> SwiGLUExperts:
    """Converted by hand, so that this file tests layers alone."""
    torch.manual_seed(0)
    module = SwiGLUExperts(count, dim, hidden, dtype=dtype)
    for name, p in list(module.named_parameters()) if config is not None else ():
        if config.master_weights:
            weight = MasterWeightTensor(p.detach(), config)
        elif config.weight_format.has_global_scale:
            weight = NVFP4Tensor.from_hp(p.detach(), config=config)
        else:
            power_of_2 = config.power_of_2_scales
            weight = BlockwiseFP8Tensor.from_hp(p.detach(), power_of_2_scales=power_of_2, config=config)
        setattr(module, name, nn.Parameter(weight))
    return module


def inputs_of(routing, width: int = DIM, dtype=torch.float32, seed: int = 0):
    """(x, dy, group_ends) with NaN in the rows after the last group, which nothing may see."""
    ends, tokens = routing
    x, dy = (random_tensor(tokens, width, dtype=dtype, seed=seed + i) / 64 for i in (0, 7)) if tokens else (
        torch.empty(0, width, dtype=dtype) for _ in range(2)
    )  # fmt: skip
    x[ends[-1] :], dy[ends[-1] :] = float("nan"), float("nan")
    return x, dy, torch.tensor(ends, dtype=torch.int32)


def results(module, x, dy, group_ends, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of a pass from fresh gradients."""
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    out = (module if run is None else run)(x, group_ends)
    out.backward(dy.to(out.dtype))
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


class SwiGLU(torch.autograd.Function):
    """`ops.swiglu` and its gradients."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return ops.swiglu(*gate_up.chunk(2, 1))

    @staticmethod
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        return torch.cat(ops.swiglu_backward(dh, *gate_up.chunk(2, 1)), 1)


def composed(module):
    """What the fused function promises to equal."""

    def run(x, group_ends):
        return grouped_linear(SwiGLU.apply(grouped_linear(x, module.gate_up, group_ends)), module.down, group_ends)

    return run
