"""A weight that changes between forward and backward: autograd refuses it, eager and compiled, as for a plain layer."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, NVFP4, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP, grouped_linear

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 48, 64))

    def forward(self, x, group_ends):
        return grouped_linear(x, self.weight, group_ends)


LAYERS = {
    "linear": lambda: nn.Linear(64, 96),
    "norm_linear": lambda: NormLinear(64, 96),
    "swiglu": lambda: SwiGLUMLP(64, 48),
    "experts": Experts,
    "swiglu_experts": lambda: SwiGLUExperts(3, 64, 48),
}
BACKENDS = (None, "aot_eager", "inductor")


def adamw(weight, **options) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, **options).step()


WRITERS = {
    "add_": lambda weight: weight.add_(1),
    "copy_": lambda weight: weight.copy_(torch.randn(weight.shape)),
    "optimizer": lambda weight: adamw(weight, foreach=False),
    "foreach_optimizer": lambda weight: adamw(weight, foreach=True),
}


def layer(name: str, config):
    """(layer, one of its weights, what it is called with)."""
    torch.manual_seed(0)
    module = LAYERS[name]()
    of_experts = "experts" in name
    if config is not None:
        quantize_(module, config, filter_fn=experts() if of_experts else None)
    weight = next(p for p in module.parameters() if p.dim() > 1)
    group_ends = (torch.tensor([5, 20, 33], dtype=torch.int32),) if of_experts else ()
    return module, weight, (torch.randn(33, 64, requires_grad=True), *group_ends)


def check(name, config, backend, writers) -> None:
    module, weight, args = layer(name, config)
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    for write in writers:
        out = run(*args)
        with torch.no_grad():
            write(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        # What is computed of the new values is let through.
        run(*args).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_plain_layer_refuses_it(backend):
    check("linear", None, backend, WRITERS.values())


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_it(name, backend):
    check(name, FP8, backend, WRITERS.values())


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_hold_payloads_until_backward_and_no_transposed_copies(name, config):
    module, _, args = layer(name, replace(config, master_weights=False))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for weight in [p for p in module.parameters() if p.dim() > 1]:
        out = compiled(*args)
        held = [x.view(torch.uint8) for x in out.grad_fn.saved_tensors if x.dtype == weight.qdata.dtype]
        assert any(x.data_ptr() == weight.qdata.data_ptr() for x in held)
        transposed = weight.columnwise()[0].view(torch.uint8)
        assert not any(torch.equal(x, transposed) for x in held)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_inductor_refuses_it(config):
    check("linear", config, "inductor", WRITERS.values())


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
@pytest.mark.parametrize("name", ("linear", "norm_linear", "experts"))
def test_quantized_weights_refuse_it(name, backend):
    check(name, replace(FP8, master_weights=False), backend, [WRITERS["copy_"]])


def change_and_use(module, weight, new, args):
    """What the layer gives before and after its weight is set to `new`, all of it in one graph."""
    before = module(*args).detach()
    with torch.no_grad():
        weight.copy_(new)
    return before, module(*args)


def check_change_inside(name, config, backend) -> None:
    compiled = torch.compile(change_and_use, backend=backend, fullgraph=True)
    runs = []
    for run in (change_and_use, compiled):
        module, weight, args = layer(name, config)
        new = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            without_grad = run(module, weight, new, args)[1]
        before, after = run(module, weight, -new, args)
        after.sum().backward()
        runs.append((without_grad, before, after, args[0].grad, *(p.grad for p in module.parameters())))
    for eager, of_graph in zip(*runs):
        torch.testing.assert_close(of_graph, eager)


@pytest.mark.parametrize("name", LAYERS)
def test_a_change_inside_a_graph_is_seen_by_what_follows(name):
    check_change_inside(name, FP8, "aot_eager")


@pytest.mark.parametrize(
    "config", (None, NVFP4, replace(FP8, master_weights=False)), ids=("plain", "nvfp4", "quantized")
)
def test_inductor_sees_a_change_inside_a_graph(config):
    check_change_inside("linear", config, "inductor")
