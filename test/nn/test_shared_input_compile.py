"""Layers that share their input, compiled: one quantization in the graph, one copy from forward to backward."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, both_formats, every_recipe, forward_backward, replace
from shared_inputs import OPS, VARIANTS, Attention, assert_same, attention, tokens
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")


def saved_by_graphs(model, x) -> tuple[int, int, list]:
    """(quantizations in the forward graph, in the backward graph, bits) of a compiled pass."""
    from torch._dynamo.backends.common import aot_autograd

    counts = []

    def count(graph, inputs):
        names = [node.target.overloadpacket for node in graph.graph.nodes if hasattr(node.target, "overloadpacket")]
        counts.append(sum(names.count(op) for op in (OPS.quantize_both, OPS.quantize, OPS.quantized_output)))
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    results = forward_backward(torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True), x)
    forward, backward = counts
    return forward, backward, results


@every_recipe
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_compiled_graphs_quantize_the_input_once(config, variant):
    config = replace(config, **variant)
    expected = forward_backward(attention(config, fused=False), tokens(33))
    forward, backward, results = saved_by_graphs(attention(config), tokens(33))
    # What was saved in high precision is quantized again, for the weight of each layer.
    assert (forward, backward) == (2, 8 if "save_activations" in variant else 4)
    assert_same(results, expected)


def test_no_recompilation_when_token_counts_change():
    model, counter = attention(FP8), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for count in (300, 517, 1024):
        x = tokens(count).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).sum().backward()
    assert counter.frame_count == 1


def test_layers_of_a_model_that_are_compiled_one_by_one_share_their_graph():
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(*(attention(FP8) for _ in range(10)))
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    model(tokens(33).requires_grad_()).sum().backward()
    assert counter.frame_count == 1


def test_classes_are_compiled_apart():
    """Many classes, as models and their reloads have them, do not add up to the recompilations of one."""
    for index in range(torch._dynamo.config.recompile_limit + 2):
        model = attention(FP8, cls=type(f"Attention{index}", (Attention,), {}))
        torch.compile(model, backend="eager", fullgraph=True)(tokens(33))


@both_formats
def test_inductor_gives_the_bits_of_layers_that_share_nothing(config):
    expected = forward_backward(torch.compile(attention(config, fused=False), fullgraph=True), tokens(33))
    torch._dynamo.reset()
    assert_same(forward_backward(torch.compile(attention(config), fullgraph=True), tokens(33)), expected)
