"""swiglu_linear and SwiGLUMLP: the bits of their operations composed by hand, shapes and dtypes, memory, compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, FP8_POW2, FP8_SQUARES, NVFP4, linear_by_hand
from named_results import assert_same, results, tokens
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, ops
from torchao_blockwise.nn import SwiGLUMLP, swiglu_linear
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")

recipes = pytest.mark.parametrize("config", (FP8, FP8_POW2, FP8_SQUARES), ids=("fp8", "fp8_pow2", "fp8_128x128"))
SHAPES = [(48,), (5, 48), (2, 3, 48), (0, 48), (300, 64), (129, 200), (33, 65)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def mlp_of(config, dim=64, hidden=96, dtype=torch.float32, bias=False, device="cpu") -> SwiGLUMLP:
    torch.manual_seed(0)
    mlp = SwiGLUMLP(dim, hidden, bias=bias, dtype=dtype, device=device)
    if config is not None:
        quantize_(mlp, config)
    return mlp


def mlp_by_hand(mlp, x, dy, config):
    """Two linears by hand, with SwiGLU and its gradients between them."""
    gate_up_weight, down_weight = mlp.gate_up.weight.hp, mlp.down.weight.hp
    x2d, dy2d = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    width = gate_up_weight.shape[0]
    gate_up = linear_by_hand(x2d, gate_up_weight, None, x2d.new_zeros(x2d.shape[0], width), config)[0]
    gate, up = gate_up.chunk(2, 1)
    out, dh, grad_down, grad_bias = linear_by_hand(ops.swiglu(gate, up), down_weight, mlp.down.bias, dy2d, config)
    merged = torch.cat(ops.swiglu_backward(dh, gate, up), 1)
    _, grad_x, grad_gate_up, _ = linear_by_hand(x2d, gate_up_weight, None, merged, config)
    named = {"out": out.view(dy.shape), "x": grad_x.view(x.shape), "gate_up.weight": grad_gate_up}
    named |= {"down.weight": grad_down, "down.bias": grad_bias}
    return {name: t.detach() for name, t in named.items() if t is not None}


# --- swiglu_linear ----------------------------------------------------------------------------------------------------


def function_results(gate, up, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    weight.grad = None
    out = swiglu_linear(*leaves, weight, bias)
    out.backward(dy)
    return out.detach(), leaves[0].grad, leaves[1].grad, weight.grad


@recipes
@shapes
def test_the_function_is_its_composed_operations(shape, config, device):
    gate, up = (tokens(*shape, seed=s, device=device) for s in (1, 2))
    dy, bias = tokens(*shape[:-1], 40, seed=7, device=device), torch.ones(40, device=device)
    weight = nn.Parameter(MasterWeightTensor(tokens(40, shape[-1], device=device), config))
    h = ops.swiglu(*(t.reshape(-1, shape[-1]) for t in (gate, up))).view(shape)
    out, dh, grad_weight, _ = linear_by_hand(h, weight.hp, bias, dy, config)
    gradients = ops.swiglu_backward(*(t.reshape(-1, shape[-1]) for t in (dh, gate, up)))
    expected = out, *(g.view(shape) for g in gradients), grad_weight
    for got, want in zip(function_results(gate, up, weight, bias, dy), expected):
        assert_bitwise_equal(got, want)


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


# --- SwiGLUMLP --------------------------------------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("hidden", (96, 128, 130))
@shapes
def test_the_mlp_is_its_composed_operations(shape, hidden, config, device):
    mlp = mlp_of(config, shape[-1], hidden, device=device)
    x, dy = tokens(*shape, device=device), tokens(*shape, seed=7, device=device)
    assert_same(results(mlp, x, dy), mlp_by_hand(mlp, x, dy, config))


@pytest.mark.parametrize("weights", (torch.float32, torch.bfloat16), ids=lambda d: f"weights_{str(d)[6:]}")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=lambda d: str(d)[6:])
def test_dtypes(dtype, weights):
    mlp = mlp_of(FP8, dtype=weights)
    x, dy = tokens(33, 64, dtype=dtype), tokens(33, 64, dtype=dtype, seed=7)
    assert_same(results(mlp, x, dy), mlp_by_hand(mlp, x, dy, FP8))


def test_a_bias_of_down_stays_fused_and_one_of_gate_up_does_not(monkeypatch):
    mlp, x, dy = mlp_of(FP8), tokens(33, 64), tokens(33, 64, seed=7)
    mlp.down.bias = nn.Parameter(torch.ones(64))
    assert_same(results(mlp, x, dy), mlp_by_hand(mlp, x, dy, FP8))
    biased = mlp_of(FP8, bias=True)
    got = results(biased, x, dy)
    gate, up = biased.gate_up(x).chunk(2, -1)
    assert_bitwise_equal(got["out"], swiglu_linear(gate, up, biased.down.weight, biased.down.bias).detach())
    assert all(t is not None for t in got.values())


@pytest.mark.parametrize("config", (None, NVFP4), ids=("high_precision", "nvfp4"))
def test_unfused_it_is_the_modules(config):
    mlp, x = mlp_of(config), tokens(130, 64)

    def run(x):
        gate, up = mlp.gate_up(x).chunk(2, -1)
        return mlp.down(F.silu(gate) * up)

    assert_same(results(mlp, x), results(mlp, x, run=run))


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
