"""Weights of layers that lie in one flat buffer, at other distances in each layer: the bits of separate buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, linears_and_experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")

TOKENS, DIM, HIDDEN, LAYERS = 256, 256, 384, 3
# Elements between neighbors in the flat buffer, in each layer another number; addresses stay multiples of 16 bytes.
GAPS = (0, 1024, 4096)

CONFIGS = {
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8_high_precision": BlockwiseFP8TrainingConfig(save_activations="high_precision"),
    "nvfp4": NVFP4TrainingConfig(),
}
KINDS = {
    "linear": lambda: nn.Linear(DIM, HIDDEN),
    "norm_linear": lambda: NormLinear(DIM, HIDDEN, norm="rms", bias=True),
    "swiglu": lambda: SwiGLUMLP(DIM, HIDDEN),
    "experts": lambda: SwiGLUExperts(2, DIM, HIDDEN),
}


def flattened(layers: list[nn.Module]) -> list[nn.Module]:
    """The layers with all their Parameters in one buffer, those of each layer `GAPS` elements apart."""
    layers = copy.deepcopy(layers)
    placed, end = [], 0
    for layer, gap in zip(layers, GAPS, strict=True):
        for parameter in layer.parameters():
            placed.append((parameter, end))
            end += -(-parameter.numel() // 64) * 64 + gap
    flat = placed[0][0].new_empty(end)
    for parameter, start in placed:
        values = flat[start : start + parameter.numel()].view_as(parameter)
        values.copy_(parameter.data)
        parameter.data = values
    return layers


def in_one_buffer(x: torch.Tensor, y: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of both in one buffer, `gap` elements apart."""
    flat = x.new_zeros(x.numel() + gap + y.numel())
    parts = flat[: x.numel()].view_as(x), flat[x.numel() + gap :].view_as(y)
    return parts[0].copy_(x), parts[1].copy_(y)


def results(layers: list[nn.Module], kind: str, shared: bool, device: str) -> list[torch.Tensor]:
    """Outputs and gradients of the layers, run in turn many times."""
    found = []
    generator = torch.Generator(device).manual_seed(1)
    ends = (torch.tensor([TOKENS // 3, TOKENS], dtype=torch.int32, device=device),) if kind == "experts" else ()
    features = DIM if kind in ("swiglu", "experts") else HIDDEN
    for turn in range(6):
        for i, layer in enumerate(layers):
            sizes = (TOKENS, DIM), (TOKENS, features)
            x, dy = (torch.randn(n, generator=generator, device=device, dtype=torch.bfloat16) for n in sizes)
            if shared:
                x, dy = in_one_buffer(x, dy, GAPS[(i + turn) % LAYERS])
            x.requires_grad_()
            out = layer(x, *ends)
            out.backward(dy)
            found += [out.detach(), x.grad, *(p.grad for p in layer.parameters())]
            layer.zero_grad()
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_one_buffer_equal_layers_in_their_own(kind, config, device):
    torch.manual_seed(0)
    separate = [KINDS[kind]().to(device, torch.bfloat16) for _ in range(LAYERS)]
    together = flattened(separate)
    for layer in (*separate, *together):
        quantize_(nn.ModuleDict({"layer": layer}), CONFIGS[config], filter_fn=linears_and_experts())
    # Those in one buffer first: nothing that is kept of the others may make them right.
    got, wanted = (results(layers, kind, layers is together, device) for layers in (together, separate))
    for x, y in zip(got, wanted, strict=True):
        assert_bitwise_equal(x, y)
