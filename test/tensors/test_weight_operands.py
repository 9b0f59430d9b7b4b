"""GEMMs read the present values of a master weight, and quantize them where they read; no copy can be stale."""

from __future__ import annotations

import copy
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, both_formats, master, mlp, weight, weight_calls
from machines import Machine
from torch import nn

from torchao_blockwise import MasterWeightTensor, weights_unchanged
from torchao_blockwise._compat import modes
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
both_modes = pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))


def run_of(model, backend):
    return model if backend is None else torch.compile(model, backend=backend, fullgraph=True)


def gemms(parameter):
    """(output, grad_input) of a layer with this weight."""
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = F.linear(x, parameter)
    (grad_input,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return out.detach(), grad_input


def assert_gemms_of_now(parameter) -> None:
    """GEMMs read what `parameter` holds now: those of a fresh weight with a copy of the values."""
    fresh = MasterWeightTensor(parameter.hp.clone(), parameter.config)
    for got, expected in zip(gemms(parameter), gemms(fresh), strict=True):
        assert_bitwise_equal(got, expected)


def without_counting(w):
    with torch.autograd._unsafe_preserve_version_counter(w.hp):
        w.hp.mul_(2)


CHANGES = {
    "optimizer": lambda w: torch.optim.SGD([w], lr=1.0).step(),
    "fused": lambda w: torch.optim.AdamW([w], lr=1.0, fused=True).step(),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.add(w.hp, 1, out=w),
    "copy_": lambda w: w.copy_(master(40, 24, seed=3)),
    "data_of_data": lambda w: w.data.view(-1).data[3:].zero_(),
    "set_data": lambda w: setattr(w, "data", weight(40, 24, seed=3)),
    "hp_view": lambda w: w.hp.view(-1)[5:].fill_(2),
    "load": lambda w: nn.ParameterDict({"w": w}).load_state_dict({"w": weight(40, 24, seed=3)}),
    "setitem": lambda w: w.__setitem__((slice(None), 2), 7.0),
    "transposed": lambda w: w.t()[0].mul_(3),
    # What moves no version counter.
    "hp_data": lambda w: w.hp.data.mul_(2),
    "numpy": lambda w: w.hp.numpy().fill(3),
    "dlpack": lambda w: torch.from_dlpack(w.hp).mul_(2),
    "storage": lambda w: w.hp.untyped_storage().fill_(1),
    "preserved": without_counting,
    "compiled": lambda w: torch.compile(lambda x: x.mul_(2), backend="aot_eager")(w),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_gemm_sees_every_change_of_value(change):
    parameter = master(40, 24)
    parameter.grad = torch.ones(40, 24)
    before = parameter.hp.clone(), gemms(parameter)
    with torch.no_grad():
        change(parameter)
    assert not torch.equal(parameter.hp, before[0])
    assert not torch.equal(gemms(parameter)[0], before[1][0])
    assert_gemms_of_now(parameter)


@both_modes
def test_the_next_step_sees_a_change_that_nothing_counts(backend):
    model, x = mlp(FP8), torch.randn(7, 64)
    run = run_of(model, backend)
    first = run(x)
    model[0].weight.hp.numpy()[:] *= 3
    assert_bitwise_equal(run(x).detach(), copy.deepcopy(model)(x).detach())
    assert not torch.equal(run(x), first)


@both_formats
def test_changes_in_inference_mode_are_seen(config):
    with torch.inference_mode():
        w = MasterWeightTensor(weight(40, 24), config)
        first = w.quantized()
        expected = MasterWeightTensor(w.hp * -2, config).quantized()
        assert_bitwise_equal(w.mul_(-2).quantized().qdata, expected.qdata)
        assert not torch.equal(w.quantized().qdata, first.qdata)


@pytest.mark.parametrize("keep", ("rowwise", "both"))
@both_modes
def test_a_capture_neither_reads_nor_keeps(keep, backend, monkeypatch):
    """Replays of a CUDA graph repeat what it captured: they must not read copies that die with a scope."""
    model = mlp(FP8)
    run = run_of(model, backend)

    def calls_of_a_step():
        with weight_calls() as calls:
            run(torch.randn(5, 64, requires_grad=True)).sum().backward()
        return calls.quantize, calls.columnwise, calls.transpose

    with weights_unchanged(model, keep=keep):
        for before in (False, True):
            if before:
                calls_of_a_step()
            kept = model[0].weight.quantized_bytes
            with monkeypatch.context() as patch:
                Machine(patch).captures_a_graph()
                assert calls_of_a_step() == (4, 2, 0)
            assert model[0].weight.quantized_bytes == kept and (kept > 0) is before


# The stream of inductor's graphs, and whether this is their first run; "raises": as PyTorch 2.11 does in a thread that
# has no graphs.
FIRST_RUNS = {"graphs": True, "other": False, "none": False, "raises": False, "not_imported": False}


@pytest.mark.parametrize("captures", (True, False))
@pytest.mark.parametrize(("stream", "is_first_run"), FIRST_RUNS.items(), ids=FIRST_RUNS)
def test_inductors_first_run_counts_as_a_capture(stream, is_first_run, captures, monkeypatch):
    """It lies in the memory of graphs, where inductor lets no copy live on. A GPU shows that; this shows the choice."""

    def get_manager(index, create_if_none_exists):
        assert (index, create_if_none_exists) == (0, False) and stream != "raises"
        return None if stream == "none" else SimpleNamespace(stream=stream)

    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    monkeypatch.setattr(trees, "get_manager", get_manager)
    if stream == "not_imported":
        monkeypatch.delitem(sys.modules, trees.__name__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "graphs")
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert modes.is_capturing(x) is (captures or is_first_run)
    assert not modes.is_capturing(torch.zeros(1))
