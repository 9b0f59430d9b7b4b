"""Layers whose passes are replayed: they train with the bits of passes that are not."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from replayed import CALLS, assert_replayed, values
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, weights_unchanged
from torchao_blockwise.conversion import experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP
from torchao_blockwise.nn.fused_modules import fuse_class
from torchao_blockwise.ops import replay
from torchao_blockwise.ops.recording import RECORDED
from torchao_blockwise.tensors import MasterWeightTensor

pytestmark = pytest.mark.usefixtures("no_interpreter")
CONFIGS = {
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8_high_precision": BlockwiseFP8TrainingConfig(save_activations="high_precision"),
    "fp8_pow2": BlockwiseFP8TrainingConfig(power_of_2_scales=True, out_dtype=torch.float32),
    "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
    "nvfp4_full": NVFP4TrainingConfig(),
    "fp8_weight": BlockwiseFP8TrainingConfig(master_weights=False),
}


def trained(make_layer, make_inputs, steps: int = 6) -> list[torch.Tensor]:
    """Outputs, gradients and weights of some steps of SGD."""
    torch.manual_seed(0)
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        x, *more = make_inputs()
        x.requires_grad_()
        out = layer(x, *more)
        out.backward(torch.randn_like(out))
        optimizer.step()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        seen += [
            p.detach().dequantize() if hasattr(p, "dequantize") else p.detach().clone() for p in layer.parameters()
        ]
        optimizer.zero_grad()
    return seen


def assert_trains_alike(make_layer, make_inputs, replays, monkeypatch) -> None:
    got = trained(make_layer, make_inputs)
    assert replays() >= 4
    monkeypatch.setattr(replay, "serves", lambda device: False)
    before = replays()
    wanted = trained(make_layer, make_inputs)
    assert replays() == before
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(64, 96), (3, 20, 96), (96,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_high_precision", "fp8_pow2", "nvfp4", "nvfp4_full"])
def test_linear_trains_alike(device, name, bias, shape, replays, monkeypatch):
    def layer():
        linear = nn.Linear(96, 80, bias=bias, device=device)
        quantize_(linear, CONFIGS[name])
        return linear

    assert_trains_alike(layer, lambda: (values(device, *shape),), replays, monkeypatch)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_full"])
def test_swiglu_trains_alike(device, name, replays, monkeypatch):
    def layer():
        mlp = SwiGLUMLP(64, 128, device=device)
        quantize_(mlp, CONFIGS[name])
        return mlp

    assert_trains_alike(layer, lambda: (values(device, 48, 64),), replays, monkeypatch)


class Readers(nn.Module):
    """Two layers that share their input; one has a bias."""

    def __init__(self, device):
        super().__init__()
        self.q, self.k = (nn.Linear(96, 64, bias=bias, device=device) for bias in (False, True))

    def forward(self, x):
        return self.q(x) * self.k(x)


@pytest.mark.parametrize("name", ["fp8", "fp8_high_precision", "fp8_pow2", "nvfp4", "nvfp4_full"])
def test_layers_that_share_their_input_train_alike(device, name, replays, monkeypatch):
    def layer():
        model = Readers(device)
        quantize_(model, CONFIGS[name])
        fuse_class(model, ("q", "k"))
        return model

    assert_trains_alike(layer, lambda: (values(device, 3, 20, 96),), replays, monkeypatch)


def test_the_shared_quantization_is_replayed(device, replays):
    model = Readers(device)
    quantize_(model, CONFIGS["fp8"])
    fuse_class(model, ("q", "k"))
    with torch.no_grad():
        counts = []
        for _ in range(4):
            before = replays()
            model(values(device, 64, 96))
            counts.append(replays() - before)
    # The quantization, and the product of each layer; the products are of one kind but for the bias.
    assert counts[2:] == [3, 3]


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_experts_train_alike(device, name, replays, monkeypatch):
    def layer():
        model = nn.ModuleDict({"experts": SwiGLUExperts(3, 64, 128, device=device)})
        quantize_(model, CONFIGS[name], filter_fn=experts())
        return model["experts"]

    def inputs():
        ends = torch.randint(0, 50, (3,)).sort().values
        return values(device, 50, 64), ends.to(device, torch.int32)

    assert_trains_alike(layer, inputs, replays, monkeypatch)


def test_a_quantized_weight(device, replays):
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8_weight"])
    arguments = [(values(device, 32, 96).requires_grad_(),) for _ in range(CALLS)]
    assert_replayed(lambda x: torch.autograd.grad(linear(x).sum(), x), arguments, replays)


@pytest.mark.usefixtures("replays")
def test_main_grad(device):
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8"])
    linear.weight.main_grad = torch.zeros(80, 96, device=device)
    x = values(device, 32, 96)
    for i in range(CALLS):
        linear(x).backward(torch.ones(32, 80, dtype=torch.bfloat16, device=device))
        assert linear.weight.grad is None and linear.weight.grad_added_to_main_grad
        if i == 0:
            first = linear.weight.main_grad.clone()
        torch.testing.assert_close(linear.weight.main_grad, first * (i + 1), rtol=1e-6, atol=0)


def test_scopes_and_recordings_do_not_meet(device, replays):
    """A recording reads no copy that a scope keeps, and a scope's copy serves where a recording is known."""
    linear = nn.Linear(96, 80, bias=False, device=device)
    quantize_(linear, CONFIGS["fp8"])
    x = values(device, 32, 96)
    with torch.no_grad():
        plain = [linear(x) for _ in range(4)]
        with weights_unchanged(linear):
            kept = [linear(x) for _ in range(4)]
        linear.weight.copy_(2 * linear.weight)
        after = [linear(x) for _ in range(4)]
    assert all(torch.equal(out, plain[0]) for out in plain + kept)
    assert all(torch.equal(out, 2 * plain[0]) for out in after)
    assert replays() > 0


def test_under_autocast_and_in_inference_mode(device, replays):
    linear = nn.Linear(96, 80, device=device)
    quantize_(linear, CONFIGS["fp8"])
    x = values(device, 32, 96, dtype=torch.float32)
    wanted = linear(x).detach()
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        with torch.inference_mode():
            assert torch.equal(linear(x), wanted) and linear(x).is_inference()
        assert torch.equal(linear(x), wanted) and not linear(x).is_inference()
    assert replays() > 0


def test_checkpointing_and_several_forward_passes(device, replays):
    linear = nn.Linear(96, 80, device=device)
    quantize_(linear, CONFIGS["fp8"])
    for _ in range(4):
        inputs = [values(device, 32, 96).requires_grad_() for _ in range(3)]
        outs = [torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False) for x in inputs]
        again = [linear(x) for x in inputs]
        for out, other in zip(outs, again, strict=True):
            assert torch.equal(out, other)
        grads = [torch.autograd.grad(out.sum(), x)[0] for x, out in zip(inputs, outs)]
        for x, other, grad in zip(inputs, again, grads):
            assert torch.equal(torch.autograd.grad(other.sum(), x)[0], grad)
    assert replays() > 0


def test_wrong_input_is_refused_where_recordings_are_known(replays):
    linear = nn.Linear(96, 80)
    quantize_(linear, CONFIGS["fp8"])
    for _ in range(4):
        linear(torch.randn(8, 96))
    assert replays() > 0
    with pytest.raises(ValueError, match="must agree in K"):
        linear(torch.randn(8, 95))
    with pytest.raises(TypeError, match="bfloat16, float16 or float32"):
        linear(torch.zeros(8, 96, dtype=torch.int64))
    with pytest.raises(ValueError, match="weight"):
        F.linear(torch.randn(8, 96, device="meta"), linear.weight)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_and_its_linear_train_alike(device, kind, replays, monkeypatch):
    def layer():
        layer = NormLinear(96, 80, norm=kind, bias=True, device=device)
        quantize_(layer, CONFIGS["fp8"])
        return layer

    assert_trains_alike(layer, lambda: (values(device, 3, 20, 96),), replays, monkeypatch)


def test_few_frames_lie_between_a_linear_layer_and_its_launches(replays):
    """Own frames from `F.linear` on, the program of the recording included: what the host pays for at each layer."""
    weight = MasterWeightTensor(torch.randn(64, 96), BlockwiseFP8TrainingConfig())
    x, frames, seen = torch.randn(32, 96), [], []
    for _ in range(3):
        F.linear(x, weight)

    def watch(frame, event, _):
        name = frame.f_code.co_filename
        if event in ("call", "return") and (name == RECORDED or "torchao_blockwise/" in name):
            frames.append(frame.f_code.co_name) if event == "call" else frames.pop()
            if name == RECORDED:
                seen[:] = seen or frames[:]

    sys.setprofile(watch)
    F.linear(x, weight)
    sys.setprofile(None)
    assert seen[-1] == "program" and len(seen) <= 6, seen
