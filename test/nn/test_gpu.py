"""Layers on a GPU: inductor, copies to the host, memory that a step leaves, malformed ends of groups."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, assert_same, both_formats, converted, mlp
from torch import nn

from torchao_blockwise import experts, weights_unchanged
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.ops.device import tables

pytestmark = pytest.mark.gpu

EXPERTS, N, K, TOKENS = 8, 384, 256, 500


class Grouped(nn.Module):
    """A GEMM of experts; `sizes` of the groups are read as the layer runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, N, K))

    def forward(self, x):
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=self.sizes.cumsum(0, dtype=torch.int32))


def layer_of(kind: str, config) -> nn.Module:
    torch.manual_seed(0)
    layer = (nn.Linear(K, N, bias=False) if kind == "linear" else Grouped()).to("cuda", torch.bfloat16)
    return converted(layer, config, experts() if kind == "grouped" else None)


def tokens(count: int = TOKENS, width: int = K) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(count)
    return torch.randn(count, width, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.usefixtures("fresh_dynamo")
@both_formats
@pytest.mark.parametrize("kind", ("linear", "grouped"))
def test_inductor_compiles_forward_and_backward(kind, config):
    """Bare layers, so that all that inductor generates is around our operations and not in them."""
    layer = layer_of(kind, config)
    compiled = torch.compile(layer, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (500, 640, 1100):
            chosen = torch.multinomial(torch.rand(EXPERTS), count, True)
            layer.sizes = chosen.bincount(minlength=EXPERTS).cuda()
            results = []
            for run in (compiled, layer):
                layer.zero_grad()
                x = tokens(count).requires_grad_()
                torch._dynamo.mark_dynamic(x, 0)
                out = run(x)
                out.backward(torch.ones_like(out))
                results.append((out.detach(), x.grad, layer.weight.grad))
            assert_same(*results)


def test_a_step_leaves_no_copy_of_a_weight():
    model, x = mlp(FP8, (2048, 4096, 2048), bias=False, dtype=torch.bfloat16).cuda(), tokens(512, 2048).requires_grad_()

    def held(keep: str = "") -> int:
        """Bytes that a step leaves, of them those that a scope keeps."""
        with weights_unchanged(model, keep=keep) if keep else contextlib.nullcontext():
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
            x.grad = None
            # Of launches for many tensors a bounded number of tables is kept, of addresses and sizes.
            tables._tables.clear()
            return torch.cuda.memory_allocated()

    held()  # Libraries take their workspaces at first use.
    nothing, rowwise, both, after = held(), held("rowwise"), held("both"), held()
    weights = 2 * 2048 * 4096
    assert after == nothing and weights <= rowwise - nothing <= weights * 1.01
    assert 2 * weights <= both - nothing <= 2 * weights * 1.01


def grouped_step(config, ends: torch.Tensor) -> list[torch.Tensor]:
    weight, x = layer_of("grouped", config).weight, tokens().requires_grad_()
    out = grouped_linear(x, weight, ends.int().cuda())
    out.backward(tokens()[:, :1].expand_as(out))
    return [out.detach(), x.grad, weight.grad]


def test_malformed_group_ends_reach_no_other_memory():
    """On a GPU nobody reads them before a kernel does: they are clamped, and results are those of the clamped ones."""
    for ends in ([-5, 600, 300, 10**9] * 2, [400, 100, -(2**31), 450] * 2):
        clamped = torch.tensor(ends).clamp(0, TOKENS).cummax(0).values
        assert_same(grouped_step(FP8, torch.tensor(ends)), grouped_step(FP8, clamped))
