"""Profiles name the passes of layers, whoever runs them."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import linears_and_experts
from torchao_blockwise.nn import SwiGLUExperts, SwiGLUMLP

pytestmark = pytest.mark.usefixtures("no_interpreter")

ENDS = torch.tensor([3, 8], dtype=torch.int32)
LAYERS = {
    "linear": (lambda: nn.Linear(32, 32), ()),
    "SwiGLUMLP": (lambda: SwiGLUMLP(32, 48), ()),
    "swiglu_experts": (lambda: SwiGLUExperts(2, 32, 48), (ENDS,)),
}


def names_of_a_step(model: nn.Module, *rest: torch.Tensor) -> list[str]:
    """What a profile calls passes of ours, in the order in which they ran."""
    x = torch.randn(8, 32, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x, *rest).sum().backward()
    found = [e for e in profile.events() if e.name.startswith("torchao_blockwise.")]
    return [e.name for e in sorted(found, key=lambda e: e.time_range.start)]


def converted(kind: str, config) -> nn.Module:
    model = LAYERS[kind][0]()
    quantize_(model, config, filter_fn=linears_and_experts())
    return model


@pytest.mark.parametrize("adds_to_main_grad", (False, True), ids=("grad", "main_grad"))
@pytest.mark.parametrize("kind", LAYERS)
def test_passes_have_names(kind, adds_to_main_grad):
    model, (_, rest) = converted(kind, FP8), LAYERS[kind]
    for p in model.parameters() if adds_to_main_grad else ():
        p.main_grad = torch.zeros(p.shape)
    expected = [f"torchao_blockwise.{kind}.{name}" for name in ("forward", "backward")]
    assert names_of_a_step(model, *rest) == expected


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_profiler_breaks_no_compiled_graph():
    model = torch.compile(converted("linear", FP8), backend="aot_eager", fullgraph=True)
    # A compiled graph has operations, whose names profiles show anyway.
    assert names_of_a_step(model) == []
