"""Where GEMMs quantize a master weight: inference tensors, and captures of CUDA graphs, which keep no copy.

That they read its present values is checked in test/test_writers_and_readers.py.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import FP8, both_formats, mlp, weight, weight_calls
from machines import Machine

from torchao_blockwise import MasterWeightTensor, weights_unchanged
from torchao_blockwise._compat import modes
from torchao_blockwise.testing import assert_bitwise_equal

both_modes = pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))


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
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)

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
