"""DistributedDataParallel: gradients of a converted model are averaged over ranks, like those of any model."""

from __future__ import annotations

import compiled_ddp
import pytest
import torch
import torch.distributed as dist
from every_layer import CONFIGS, every_model, make, tokens
from helpers import FP8 as CONFIG
from helpers import ddp_scope_worker, ddp_worker, mlp, replace, selected_cases
from ranks import spawn

from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

# (model, config, which wraps which, backend, option); see compiled_ddp.py.
COMPILED = [
    ("small", "fp8", "compile(DDP)", "aot_eager", "tiny_buckets"),
    ("small", "nvfp4", "DDP(compile)", "aot_eager", "tiny_buckets"),
    ("mixture", "fp8", "DDP(compile)", "inductor", "tiny_buckets"),
    ("linear", "nvfp4", "compile(DDP)", "inductor", "tiny_buckets"),
]
SLOW = [
    ("large", config, order, "inductor", "default_buckets")
    for config in ("fp8", "nvfp4")
    for order in ("compile(DDP)", "DDP(compile)")
]
SLOW += [
    ("small", config, order, "aot_eager", option)
    for config, order in (("fp8", "compile(DDP)"), ("nvfp4", "DDP(compile)"))
    for option in ("accumulation", "static_graph", "unused_parameters")
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(compiled_ddp.run, 2, tmp_path_factory.mktemp("compiled"), selected_cases(request))


@pytest.mark.parametrize(
    "case", [*COMPILED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join
)
def test_compiled(case, raised):
    assert [(of_rank or {}).get(("compiles", *case), "not reached") for of_rank in raised] == [None, None]


@every_model
@pytest.mark.parametrize("config", ("fp8", "nvfp4"))
@pytest.mark.parametrize("training", (True, False), ids=("training", "evaluation"))
def test_no_operation_of_a_graph_returns_its_input(model, config, training, fresh_dynamo):
    """DDP's optimizer cannot compile a part of a graph that takes one tensor under two names."""
    layer, x = make(model, CONFIGS[config]), tokens(model).requires_grad_(training)
    shapes = [x] if model in ("experts", "grouped") else [x, x[None]]
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.set_grad_enabled(training):
        for given in shapes:
            torch.compile(layer, backend=keep, fullgraph=True, dynamic=False)(given)
    assert len(graphs) == len(shapes)
    for node in (node for graph in graphs for node in graph.graph.nodes):
        value = node.meta.get("example_value")
        is_input = [value is source.meta.get("example_value") for source in node.all_input_nodes]
        assert value is None or not any(is_input), node.format_node()


def test_microbatches_in_a_scope(tmp_path):
    """Without and with `weights_unchanged`: the same bits after two steps of three microbatches."""
    config = replace(CONFIG, backend="reference")
    for of_rank in spawn(ddp_scope_worker, 2, tmp_path, config):
        plain, scoped = of_rank
        assert plain.keys() == scoped.keys()
        assert all(torch.equal(plain[name], scoped[name]) for name in plain)


def test_gradients_are_the_mean_over_ranks(tmp_path, ranks=2):
    config = replace(CONFIG, backend="reference")
    results = spawn(ddp_worker, ranks, tmp_path, config)
    model = mlp(config)
    for step in range(2):
        total = None
        for rank in range(ranks):
            model.zero_grad()
            model(
                torch.randn(24, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
            grads = [p.grad / ranks for p in model.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        for p, mean in zip(model.parameters(), total):
            p.grad = mean
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for name, value in model.state_dict().items():
        assert torch.equal(results[0][name], results[1][name]), name
        assert relative_error(results[0][name], value) < 1e-6, name
