"""DistributedDataParallel: gradients of a converted model are averaged over ranks, like those of any model."""

from __future__ import annotations

import ddp_checks
import pytest
import torch
import torch.distributed as dist
from every_layer import CONFIGS, every_model, make, tokens
from helpers import selected_cases
from ranks import spawn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

# ("compiles", model, config, which wraps which, backend, option) and ("averages", config); see ddp_checks.py.
CASES = [
    ("averages", "fp8"),
    ("compiles", "small", "fp8", "compile(DDP)", "aot_eager", "tiny_buckets"),
    ("compiles", "small", "nvfp4", "DDP(compile)", "aot_eager", "tiny_buckets"),
    ("compiles", "mixture", "fp8", "DDP(compile)", "inductor", "tiny_buckets"),
    ("compiles", "linear", "nvfp4", "compile(DDP)", "inductor", "tiny_buckets"),
]
SLOW = [("averages", "nvfp4")]
SLOW += [
    ("compiles", "large", config, order, "inductor", "default_buckets")
    for config in ("fp8", "nvfp4")
    for order in ("compile(DDP)", "DDP(compile)")
]
SLOW += [
    ("compiles", "small", config, order, "aot_eager", option)
    for config, order in (("fp8", "compile(DDP)"), ("nvfp4", "DDP(compile)"))
    for option in ("accumulation", "static_graph", "unused_parameters")
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(ddp_checks.run, 2, tmp_path_factory.mktemp("compiled"), selected_cases(request))


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join)
def test_over_ranks(case, raised):
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]


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
