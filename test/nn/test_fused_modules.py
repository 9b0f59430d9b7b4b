"""MLPs that quantize their SwiGLU as they compute it: bits of `swiglu_linear`, and elsewhere the model's own code."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from every_layer import MLP
from helpers import FP8, FP8_POW2, NVFP4, forward_backward, replace
from shared_inputs import OPS, Counter, assert_same
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import weights_unchanged
from torchao_blockwise.nn import swiglu_linear
from torchao_blockwise.nn.fused_modules import fuse_class, why_not_shared, why_not_swiglu

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")


class RoundedOnce(MLP):
    """The unfused equivalent of a fused MLP."""

    def forward(self, x):
        return swiglu_linear(self.gate(x), self.up(x), self.down.weight, self.down.bias)


def mlp(config, fused: bool = True, cls=MLP, **options) -> MLP:
    torch.manual_seed(0)
    model = cls(**options)
    quantize_(model, config)
    if fused:
        fuse_class(model, ("gate", "up"), down="down", act="act")
    return model


def tokens(*leading: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*leading, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("config", (FP8, FP8_POW2, replace(FP8, save_activations="high_precision")), ids=range(3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("autocast", (False, True), ids=("", "autocast"))
@pytest.mark.parametrize("leading", ((3, 11), (0,), (256,)), ids=str)
def test_bits_are_those_of_swiglu_linear(config, dtype, autocast, leading):
    x = tokens(*leading, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        expected = forward_backward(mlp(config, fused=False, cls=RoundedOnce, dtype=dtype), x)
        assert_same(forward_backward(mlp(config, dtype=dtype), x), expected)


def test_the_activation_is_quantized_as_it_is_computed():
    model = mlp(FP8)
    with Counter() as counter:
        model(tokens(33)).sum().backward()
    # The input, and in backward the gradients of three layers; h comes from the operation that computes it.
    assert (counter.quantized, counter.ran[OPS.swiglu_quantize]) == (4, 1)


def act_hook(model) -> None:
    model.act.register_forward_hook(lambda module, args, out: out * 2)


def halves(module, grad_input, grad_output):
    return (grad_input[0] / 2,)


CHANGES = {
    "act_hook": (FP8, {}, act_hook, "act is a SiLU, or has hooks"),
    "gelu": (FP8, {"act": nn.GELU}, lambda m: None, "act is a GELU, or has hooks"),
    "nvfp4": (NVFP4, {}, lambda m: None, "down trains in NVFP4"),
    "down_hook": (FP8, {}, lambda m: m.down.register_forward_pre_hook(lambda m, x: (x[0] * 2,)), "down has hooks"),
    "backward_hook": (FP8, {}, lambda m: m.down.register_full_backward_hook(halves), "down has hooks"),
    "wrapper": (FP8, {}, lambda m: setattr(m, "down", nn.Sequential(m.down, nn.ReLU())), "down is a Sequential"),
}


@pytest.mark.parametrize(("config", "options", "change", "reason"), CHANGES.values(), ids=CHANGES)
def test_elsewhere_the_models_own_code_runs_and_shares_the_input(config, options, change, reason):
    results = []
    for fused in (True, False):
        model = mlp(config, fused=fused, **options)
        change(model)
        if fused:
            assert why_not_swiglu(model).startswith(reason) and why_not_shared(model) is None
        results.append(forward_backward(model, tokens(33)))
    assert_same(*results)


def test_a_weight_that_changes_while_it_stands_still_is_refused():
    model = mlp(FP8)
    # The scope sees it too where it ends.
    with contextlib.suppress(RuntimeError), weights_unchanged(model):
        model(tokens(33))
        with torch.no_grad():
            model.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="down"):
            model(tokens(33))


def test_an_activation_that_is_no_module():
    class Calls(MLP):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    model = mlp(FP8, fused=False, cls=Calls)
    fuse_class(model, ("gate", "up"), down="down")
    expected = forward_backward(mlp(FP8, fused=False, cls=RoundedOnce), tokens(33))
    assert_same(forward_backward(model, tokens(33)), expected)
