"""Layers by kernels, interpreted on a machine without a GPU: results of the reference, tables of groups once a step."""

import pytest
import torch
from every_layer import every_model, make, tokens
from helpers import FP8, NVFP4, assert_same, both_formats, forward_backward, replace

from torchao_blockwise import ops
from torchao_blockwise.formats import Groups
from torchao_blockwise.testing import sqnr

kernels = pytest.importorskip("torchao_blockwise.ops.groups.tables.kernels_triton")


@every_model
@both_formats
def test_results_are_those_of_the_reference(model, config, device):
    """Within the error of sums, in fp32 or on tensor cores. Between GEMMs it can change codes: one is some 60 dB."""
    x, has_one_gemm = tokens(model).to(device), "linear" in model or model == "grouped"
    least = (45, 70) if device == "cpu" else (30, 45)
    layers = (make(model, replace(config, backend=backend)).to(device) for backend in ("auto", "reference"))
    for got, want in zip(*(forward_backward(layer, x) for layer in layers)):
        assert sqnr(got, want) > least[has_one_gemm]


@pytest.fixture
def launches(machine) -> list:
    """Launches of the kernels that make tables."""
    return machine.launches_of(kernels)


def names(launches) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


layers = pytest.mark.parametrize("kind", ("experts", "grouped"))


@pytest.mark.usefixtures("fresh_dynamo")
@layers
@both_formats
@pytest.mark.parametrize("how", ("quantized", "high_precision", "compiled"))
def test_a_step_makes_tables_once_and_gives_the_bits_of_a_step_without(
    config, kind, how, launches, monkeypatch, device
):
    config = replace(config, save_activations=how) if how == "high_precision" else config
    layer, x = make(kind, config).to(device), tokens(kind).to(device)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if how == "compiled" else layer
    got = forward_backward(layer, x, run)
    assert names(launches) == ["_group_tables_kernel"]
    monkeypatch.setattr(ops, "make_groups", lambda ends, *args, **options: Groups(ends))
    assert_same(got, forward_backward(layer, x))
    assert len(launches) > 2


def test_operations_of_several_formats_make_their_own(launches, device):
    layer = make("experts", FP8).to(device)
    layer.experts.down = make("experts", NVFP4).to(device).experts.down
    got = forward_backward(layer, tokens("experts").to(device))
    assert len(launches) > 2
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("backend", ("reference", "auto"))
def test_the_reference_makes_none(backend, launches, machine, monkeypatch):
    if backend == "auto":
        machine.without_interpreter()
    made = []
    monkeypatch.setattr(ops, "make_groups", lambda *args, **options: made.append(args))
    forward_backward(make("experts", replace(FP8, backend=backend)), tokens("experts"))
    assert launches == made == []
