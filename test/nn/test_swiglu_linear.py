"""swiglu_linear and SwiGLUMLP: halves of one tensor, fallbacks, layers made of modules, and wrong inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4
from named_results import assert_same, results, tokens
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.nn import SwiGLUMLP, swiglu_linear
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


def mlp_of(config, dim=64, hidden=96, dtype=torch.float32, bias=False, device="cpu") -> SwiGLUMLP:
    torch.manual_seed(0)
    mlp = SwiGLUMLP(dim, hidden, bias=bias, dtype=dtype, device=device)
    if config is not None:
        quantize_(mlp, config)
    return mlp


# --- swiglu_linear ----------------------------------------------------------------------------------------------------


def function_results(gate, up, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    weight.grad = None
    out = swiglu_linear(*leaves, weight, bias)
    out.backward(dy)
    return out.detach(), leaves[0].grad, leaves[1].grad, weight.grad


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=lambda d: str(d)[6:])
def test_halves_of_one_projection(dtype):
    projection = tokens(33, 96, dtype=dtype).requires_grad_()
    weight = nn.Parameter(MasterWeightTensor(tokens(40, 48), FP8))
    swiglu_linear(*projection.chunk(2, 1), weight).sum().backward()
    gate, up = (t.clone() for t in projection.detach().chunk(2, 1))
    expected = function_results(gate, up, weight, None, torch.ones(33, 40, dtype=dtype))
    assert_bitwise_equal(projection.grad, torch.cat(expected[1:3], 1))


def test_other_weights_run_pytorchs_operations():
    gate, up, w = tokens(9, 48), tokens(9, 48, seed=4), tokens(40, 48)
    assert torch.equal(swiglu_linear(gate, up, w), F.linear(F.silu(gate) * up, w))
    master = MasterWeightTensor(w, NVFP4)
    assert torch.equal(swiglu_linear(gate, up, master), F.linear(F.silu(gate) * up, master))


def test_autocast_casts_gate_and_up():
    gate, up, weight = tokens(9, 48), tokens(9, 48, seed=4), nn.Parameter(MasterWeightTensor(tokens(40, 48), FP8))
    with torch.autocast("cpu", torch.bfloat16):
        got = swiglu_linear(gate, up, weight)
    assert_bitwise_equal(got, swiglu_linear(gate.bfloat16(), up.bfloat16(), weight))


WEIGHT = MasterWeightTensor(torch.ones(40, 48), FP8)
ERRORS = {
    "shapes": (lambda: swiglu_linear(torch.ones(3, 48), torch.ones(4, 48), WEIGHT), "must agree in shape and dtype"),
    "dtypes": (lambda: swiglu_linear(torch.ones(3, 48), torch.ones(3, 48).half(), WEIGHT), "agree in shape and dtype"),
    "features": (lambda: swiglu_linear(torch.ones(3, 47), torch.ones(3, 47), WEIGHT), "must agree in K"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_wrong_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- SwiGLUMLP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", (None, NVFP4), ids=("high_precision", "nvfp4"))
def test_unfused_it_is_the_modules(config):
    mlp, x = mlp_of(config), tokens(130, 64)

    def run(x):
        gate, up = mlp.gate_up(x).chunk(2, -1)
        return mlp.down(F.silu(gate) * up)

    assert_same(results(mlp, x), results(mlp, x, run=run))
