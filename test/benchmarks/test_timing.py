"""How benchmarks measure: samples, sets of inputs, graphs on a stand-in for a GPU, and on one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from common import timing
from common.timing import input_sets, time_eager, time_runs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("nbytes", "count"), ((1, 1024), (10**6, 240), (120 * 10**6, 4), (2**30, 4), (2**31, 2), (2**33, 1))
)
def test_input_sets_overflow_the_cache_and_not_the_memory(nbytes, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(L2_cache_size=60 * 10**6))
    sets = input_sets(lambda: (torch.randn(2),), "cuda", nbytes)
    assert len(sets) == len({float(x[0]) for (x,) in sets}) == count
    assert len(input_sets(lambda: (torch.randn(2),), "cpu", nbytes)) == 1


def test_runs_are_timed_side_by_side_and_a_failure_leaves_the_others_alone():
    turns = []

    def run(name, x):
        turns.append(name)
        if name == "broken":
            raise RuntimeError("out of luck\nat line 3")
        return x + 1

    sets = [(torch.ones(4),)]
    runs = {name: (lambda x, name=name: run(name, x), sets) for name in ("a", "broken", "b")}
    times = time_runs(runs, CPU, seconds=0.0)
    assert list(times) == ["a", "broken", "b"] and times["broken"] == "RuntimeError: out of luck"
    assert times["a"].us > 0 and times["a"].repeats == times["b"].repeats == 5
    assert turns[-6:] == ["a", "b"] * 3


def test_an_output_that_no_replay_writes_is_found():
    out = torch.zeros(300)
    timing._check_written(type("", (), {"replay": lambda self: out.fill_(1.5)})(), [out])
    with pytest.raises(RuntimeError, match="left an output unwritten"):
        timing._check_written(type("", (), {"replay": lambda self: None})(), [(torch.zeros(3), out)])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_times_are_captured_and_near_those_of_a_long_loop():
    device = torch.device("cuda")
    sets = input_sets(lambda: (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16),), device)
    times = time_runs({"copy": (torch.clone, sets), "matmul": (lambda x: x @ x, sets)}, device)
    assert all(t.captured for t in times.values())
    # 64 MiB moved and 137 GFLOP: no GPU does that faster than 10 TB/s and 5 PFLOP/s.
    assert times["copy"].us > 64 * 2**20 / 10e6 and times["matmul"].us > 2 * 4096**3 / 5e9

    def agree() -> bool:
        x = sets[0][0]
        graph = time_runs({"matmul": (lambda x: x @ x, sets)}, device)["matmul"].us
        return graph == pytest.approx(time_eager(lambda: x @ x, device).us, rel=0.3)

    # Others, tests among them, may use the GPU at the same time: the two need to agree once.
    assert any(agree() for _ in range(5))
