"""swiglu_linear and SwiGLUMLP: weights of other kinds, autocast, layers made of modules, and wrong inputs."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, tokens
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor
from torchao_blockwise.nn import SwiGLUMLP, swiglu_linear
from torchao_blockwise.testing import assert_bitwise_equal, relative_error


def test_other_weights_run_pytorchs_operations():
    gate, up, w = tokens(9, 48), tokens(9, 48, seed=4), tokens(40, 48)
    assert torch.equal(swiglu_linear(gate, up, w), F.linear(F.silu(gate) * up, w))
    master = MasterWeightTensor(w, NVFP4)
    assert torch.equal(swiglu_linear(gate, up, master), F.linear(F.silu(gate) * up, master))
    mlp, x = SwiGLUMLP(64, 96), tokens(130, 64)
    gate, up = mlp.gate_up(x).chunk(2, -1)
    assert torch.equal(mlp(x), mlp.down(F.silu(gate) * up))


def test_autocast_casts_gate_and_up():
    gate, up, weight = tokens(9, 48), tokens(9, 48, seed=4), nn.Parameter(MasterWeightTensor(tokens(40, 48), FP8))
    with torch.autocast("cpu", torch.bfloat16):
        got = swiglu_linear(gate, up, weight)
    assert_bitwise_equal(got, swiglu_linear(gate.bfloat16(), up.bfloat16(), weight))


WEIGHT = MasterWeightTensor(torch.ones(40, 48), FP8)
made_of = SwiGLUMLP.from_modules
ERRORS = {
    "shapes": (lambda: swiglu_linear(torch.ones(3, 48), torch.ones(4, 48), WEIGHT), "must agree in shape and dtype"),
    "dtypes": (lambda: swiglu_linear(torch.ones(3, 48), torch.ones(3, 48).half(), WEIGHT), "agree in shape and dtype"),
    "features": (lambda: swiglu_linear(torch.ones(3, 47), torch.ones(3, 47), WEIGHT), "must agree in K"),
    "from": (lambda: made_of(nn.Linear(8, 9), nn.Linear(8, 8), nn.Linear(8, 8)), "gate and up must agree"),
    "down": (lambda: made_of(nn.Linear(8, 9), nn.Linear(8, 9), nn.Linear(8, 8)), "must have in_features=9"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_wrong_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_made_of_three_linears():
    gate, up, down = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), nn.Linear(96, 64)
    mlp, x = SwiGLUMLP.from_modules(gate, up, down), tokens(33, 64)
    expected = down(F.silu(gate(x)) * up(x)).detach()
    torch.testing.assert_close(mlp(x).detach(), expected)
    assert list(mlp.state_dict()) == ["gate_up.weight", "down.weight", "down.bias"]
    quantize_(mlp, FP8)
    assert 0 < relative_error(mlp(x), expected) < 0.1
    quantized = BlockwiseFP8Tensor.from_hp(gate.weight.detach())
    gate.weight = up.weight = nn.Parameter(quantized)
    with pytest.raises(TypeError, match=r"must hold plain Parameters, got \['BlockwiseFP8Tensor'\]"):
        SwiGLUMLP.from_modules(gate, up, down)
