"""Layers that share their input, compiled: one quantization in the graph, one copy from forward to backward."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, both_formats, forward_backward, replace
from shared_inputs import VARIANTS, Attention, assert_same, attention, counting_backend, tokens
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_layers_of_a_model_that_are_compiled_one_by_one_share_their_graph():
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(*(attention(FP8) for _ in range(10)))
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    model(tokens(33).requires_grad_()).sum().backward()
    assert counter.frame_count == 1


def test_classes_are_compiled_apart():
    """Many classes, as models and their reloads have them, do not add up to the recompilations of one."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for index in range(4):
            model = attention(FP8, cls=type(f"Attention{index}", (Attention,), {}))
            torch.compile(model, backend="eager", fullgraph=True)(tokens(33))


class Residual(nn.Module):
    """A block of a transformer without norms: its attention is not the only one to read the input."""

    def __init__(self, config, fused: bool = True, checkpointed: bool = True):
        super().__init__()
        self.attention, self.checkpointed = attention(config, fused=fused), checkpointed

    def inner(self, x):
        return x.sin() + self.attention(x) * x

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


@both_formats
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", (attention, Residual), ids=("whole", "checkpointed"))
def test_compiled_graphs_quantize_the_input_once(config, variant, make):
    """Gradients of all readers of the input are summed in the order of the plain model."""
    config, unfused = replace(config, **variant), {"checkpointed": False} if make is Residual else {}
    expected = forward_backward(make(config, fused=False, **unfused), tokens(33))
    backend, counts = counting_backend()
    results = forward_backward(torch.compile(make(config), backend=backend, fullgraph=True), tokens(33))
    forward, backward = (count["quantize_both"] + count["quantize"] for count in counts)
    # The input, once for q, k and v, and what `o` reads.
    assert forward == 2
    # The four gradients, and what was saved in high precision for each weight; after recomputation. PyTorch 2.11 does
    # not recompute what an autograd function saved.
    gradients = 8 if "save_activations" in variant else 4
    assert backward == gradients if make is attention else backward <= 2 + gradients
    assert_same(results, expected)


@both_formats
@pytest.mark.parametrize("make", (attention, Residual), ids=("whole", "checkpointed"))
def test_inductor_gives_the_bits_of_layers_that_share_nothing(config, make):
    expected = forward_backward(torch.compile(make(config, fused=False), fullgraph=True), tokens(33))
    torch._dynamo.reset()
    assert_same(forward_backward(torch.compile(make(config), fullgraph=True), tokens(33)), expected)


class Broken(Attention):
    """No compiler takes its forward pass whole."""

    def forward(self, x):
        q = self.q(x)
        torch._dynamo.graph_break()
        return self.o(q * torch.cat((self.k(x), self.v(x)), -1))


def test_a_forward_pass_that_is_compiled_in_parts():
    expected = forward_backward(attention(FP8, fused=False), tokens(33))
    model = attention(FP8, cls=Broken)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_same(forward_backward(compiled, tokens(33)), expected)
    assert_same(forward_backward(model, tokens(33)), expected)


class ByName(Attention):
    """Takes its input by name, gives it back, and hands one of its layers another tensor."""

    def forward(self, x):
        return self.o(self.q(x) * torch.cat((self.k(x.neg()), self.v(x)), -1)), x


def test_an_input_by_name_that_is_given_back():
    results = []
    for fused in (False, True):
        model, x = attention(FP8, fused=fused, cls=ByName), tokens(33).requires_grad_()
        out, same = torch.compile(model, backend="aot_eager", fullgraph=True)(x=x)
        (out.sum() + same.square().sum()).backward()
        results.append((x.grad, out.detach(), same.detach(), *(p.grad for p in model.parameters())))
    # What reads the input besides the layers that share it is summed by itself.
    torch.testing.assert_close(results[0][0], results[1][0])
    assert_same(*(result[1:] for result in results))
