"""DistributedDataParallel: gradients of a converted model are averaged over ranks, like those of any model."""

import pytest
import rank_suites
import torch
from every_layer import CONFIGS, every_model, make, tokens

POOLS = ({"ddp_checks": ()},)


@rank_suites.cases_of(POOLS)
def test_over_ranks(case, raised):
    rank_suites.check(case, raised)


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
