"""SwiGLUExperts in a layer: what it saves, checkpointing, graphs for every routing, and steps without a sync."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_steps import capture, no_syncs
from helpers import FP8, NVFP4, replace
from swiglu_layers import DIM, HIDDEN, ROUTINGS, assert_same, experts_of, inputs_of, results
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from torchao_blockwise.nn import permute, unpermute
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.mark.parametrize("save", ("fp8", "high_precision"))
def test_saved_are_gate_up_and_one_byte_an_element_of_x_and_h(save):
    tokens, dim, hidden, ends = 300, 128, 256, torch.tensor([100, 110, 300], dtype=torch.int32)
    module = experts_of(replace(FP8, save_activations=save), 3, dim, hidden, torch.bfloat16)
    x, saved = torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x, ends)
    assert (x.data_ptr() in [t.data_ptr() for t in saved]) == (save == "high_precision")
    own = (x.data_ptr(), ends.data_ptr())
    plain = {t.data_ptr(): t for t in saved if type(t) is torch.Tensor and t.data_ptr() not in own}
    fmt = FP8.activation_format
    expected = 2 * tokens * 2 * hidden
    if save == "fp8":
        # Groups are padded to whole blocks: at most 127 tokens each.
        padded = (tokens + 3 * (fmt.block[1] - 1)) // fmt.block[1] * fmt.block[1]
        expected += fmt.nbytes(dim, padded) + fmt.nbytes(hidden, padded)
    assert sum(t.nbytes for t in plain.values()) == expected


@pytest.mark.parametrize("use_reentrant", (False, True), ids=("non_reentrant", "reentrant"))
def test_activation_checkpointing(use_reentrant):
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["tail"])
    got = results(module, *inputs, lambda x, ends: checkpoint(module, x, ends, use_reentrant=use_reentrant))
    assert_same(got, results(module, *inputs))


class Layer(nn.Module):
    """A whole mixture: router, permute, experts, unpermute."""

    def __init__(self, config, experts: int, top_k: int, dim: int = DIM, hidden: int = HIDDEN):
        super().__init__()
        self.top_k = top_k
        self.experts = experts_of(config, experts, dim, hidden)
        self.router = nn.Parameter(torch.randn(experts, dim))

    def forward(self, x):
        weights, chosen = F.linear(x, self.router).softmax(-1).topk(self.top_k, -1)
        tokens, source, group_ends = permute(x, chosen, self.router.shape[0])
        return unpermute(self.experts(tokens, group_ends), source, self.top_k, weights)


def step(layer, x, run=None):
    for p in layer.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    out = (layer if run is None else run)(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("config", (FP8, NVFP4, None), ids=("fp8", "nvfp4", "high_precision"))
def test_a_layer_compiles_to_one_graph_for_every_routing(config):
    # PyTorch traces its own product in bf16 alone.
    dtype = torch.bfloat16 if config is None else torch.float32
    layer, counter = Layer(config, 4, 2).to(dtype), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for count in (300, 300, 517, 1024):
        x = torch.randn(count, DIM, dtype=dtype)
        for got, expected in zip(step(layer, x, compiled), step(layer, x)):
            assert_bitwise_equal(got, expected)
    assert counter.frame_count == 1


def test_a_layer_is_the_mixture_that_it_says():
    """Against a loop over tokens and their experts, in fp64."""
    layer, x = Layer(FP8, 4, 2), torch.randn(40, DIM)
    weights, chosen = F.linear(x, layer.router).softmax(-1).topk(2, -1)
    gate_up, down = (p.hp.double() for p in (layer.experts.gate_up, layer.experts.down))
    expected = torch.zeros(40, DIM, dtype=torch.float64)
    for t in range(40):
        for weight, e in zip(weights[t].tolist(), chosen[t].tolist()):
            gate, up = (gate_up[e] @ x[t].double()).chunk(2)
            expected[t] += weight * (down[e] @ (F.silu(gate) * up))
    assert relative_error(layer(x), expected) < 0.1


def test_gradients_of_gradients_raise():
    module, (x, _, ends) = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="swiglu_experts: backward through backward"):
        torch.autograd.grad(module(x, ends).sum(), x, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_a_layer_step_without_a_sync_and_in_a_cuda_graph(config):
    layer, x = Layer(config, 8, 2, 256, 384).cuda(), torch.randn(1024, 256, device="cuda")
    step(layer, x)
    with no_syncs():
        step(layer, x)
    graph, captured = capture(lambda: step(layer, x))
    for seed in range(2):
        x.copy_(torch.randn(1024, 256, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = [t.clone() for t in captured]
        for a, b in zip(got, step(layer, x)):
            assert_bitwise_equal(a, b)
