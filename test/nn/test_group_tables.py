"""Layers of experts make the tables of their groups once a step; kernels are interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, assert_same, both_formats, replace
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import quantize_

from torchao_blockwise import experts, ops
from torchao_blockwise.formats import Groups
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import random_tensor

kernels = pytest.importorskip("torchao_blockwise.ops.groups.tables.kernels_triton")

TOKENS, DIM, HIDDEN = 70, 32, 48


@pytest.fixture
def launches(machine) -> list:
    """Launches of the kernels that make tables."""
    return machine.launches_of(kernels)


def names(launches) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


class OneProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random_tensor(3, HIDDEN, DIM) / 64)

    def forward(self, x, group_ends):
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=group_ends)


def converted(kind, config, device) -> nn.Module:
    torch.manual_seed(0)
    module = OneProduct() if kind == "one product" else SwiGLUExperts(3, DIM, HIDDEN)
    quantize_(module, config, filter_fn=experts())
    return module.to(device)


def step(module, device, run=None, tokens: int = TOKENS) -> list[torch.Tensor]:
    x = (random_tensor(tokens, DIM, seed=tokens) / 64).to(device).requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    module.zero_grad()
    ends = torch.tensor([33, 33, 60], dtype=torch.int32, device=device)
    out = (module if run is None else run)(x, ends)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


layers = pytest.mark.parametrize("kind", ("experts", "one product"))


@layers
@both_formats
@pytest.mark.parametrize("save", ("quantized", "high_precision"))
def test_a_step_makes_tables_once_and_gives_the_bits_of_a_step_without(
    config, kind, save, launches, monkeypatch, device
):
    if save == "high_precision":
        config = replace(config, save_activations=save)
    module = converted(kind, config, device)
    got = step(module, device)
    assert names(launches) == ["_group_tables_kernel"]
    monkeypatch.setattr(ops, "make_groups", lambda ends, *args, **options: Groups(ends))
    assert_same(got, step(module, device))
    assert len(launches) > 2


@pytest.mark.usefixtures("fresh_dynamo")
@layers
@both_formats
def test_a_compiled_step_makes_tables_once_too(config, kind, launches, device):
    module, counter = converted(kind, config, device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for tokens in (TOKENS, 101):
        launches.clear()
        got = step(module, device, compiled, tokens)
        assert names(launches) == ["_group_tables_kernel"]
        assert_same(got, step(module, device, tokens=tokens))
    assert counter.frame_count == 1


def test_operations_of_several_formats_make_their_own(launches, device):
    module = converted("experts", FP8, device)
    module.down = converted("experts", NVFP4, device).down
    got = step(module, device)
    assert len(launches) > 2
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("backend", ("reference", "auto"))
def test_the_reference_makes_none(backend, launches, machine, monkeypatch):
    if backend == "auto":
        machine.without_interpreter()
    seen = []
    monkeypatch.setattr(ops, "make_groups", lambda *args, **options: seen.append(args))
    step(converted("experts", replace(FP8, backend=backend), "cpu"), "cpu")
    assert launches == seen == []
