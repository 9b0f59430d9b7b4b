"""A weight that changes between forward and backward: autograd refuses it, eager and compiled, as for a plain layer."""

from __future__ import annotations

import pytest
import torch
from every_layer import make, tokens
from helpers import FP8, NVFP4, both_formats, replace

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")


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


LAYERS = pytest.mark.parametrize("name", ("linear", "norm_linear", "swiglu_mlp", "experts", "grouped"))


def layer(name: str, config):
    """(layer, one of its weights, its input)."""
    module = make(name, config)
    return module, next(p for p in module.parameters() if p.dim() > 1), tokens(name).requires_grad_()


def check(name, config, backend, writers) -> None:
    module, weight, x = layer(name, config)
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    for write in writers:
        out = run(x)
        with torch.no_grad():
            write(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        # What is computed of the new values is let through.
        run(x).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_plain_layer_refuses_it(backend):
    check("linear", None, backend, WRITERS.values())


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
@LAYERS
def test_layers_refuse_it(name, backend):
    check(name, FP8, backend, WRITERS.values())


@both_formats
@LAYERS
def test_graphs_hold_payloads_until_backward_and_no_transposed_copies(name, config):
    module, _, x = layer(name, replace(config, master_weights=False))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for weight in [p for p in module.parameters() if p.dim() > 1]:
        out = compiled(x)
        held = [x.view(torch.uint8) for x in out.grad_fn.saved_tensors if x.dtype == weight.qdata.dtype]
        assert any(x.data_ptr() == weight.qdata.data_ptr() for x in held)
        transposed = weight.columnwise()[0].view(torch.uint8)
        assert not any(torch.equal(x, transposed) for x in held)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@both_formats
def test_inductor_refuses_it(config):
    check("linear", config, "inductor", WRITERS.values())


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
@pytest.mark.parametrize("name", ("linear", "norm_linear", "grouped"))
def test_quantized_weights_refuse_it(name, backend):
    check(name, replace(FP8, master_weights=False), backend, [WRITERS["copy_"]])


def change_and_use(module, weight, new, x):
    """What the layer gives before and after its weight is set to `new`, all of it in one graph."""
    before = module(x).detach()
    with torch.no_grad():
        weight.copy_(new)
    return before, module(x)


def check_change_inside(name, config, backend) -> None:
    compiled = torch.compile(change_and_use, backend=backend, fullgraph=True)
    runs = []
    for run in (change_and_use, compiled):
        module, weight, x = layer(name, config)
        new = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            without_grad = run(module, weight, new, x)[1]
        before, after = run(module, weight, -new, x)
        after.sum().backward()
        runs.append((without_grad, before, after, x.grad, *(p.grad for p in module.parameters())))
    for eager, of_graph in zip(*runs):
        torch.testing.assert_close(of_graph, eager)


@LAYERS
def test_a_change_inside_a_graph_is_seen_by_what_follows(name):
    check_change_inside(name, FP8, "aot_eager")


@pytest.mark.parametrize(
    "config", (None, NVFP4, replace(FP8, master_weights=False)), ids=("plain", "nvfp4", "quantized")
)
def test_inductor_sees_a_change_inside_a_graph(config):
    check_change_inside("linear", config, "inductor")
