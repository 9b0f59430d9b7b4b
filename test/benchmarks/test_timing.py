"""How benchmarks measure: samples, sets of inputs, graphs on a stand-in for a GPU, and on one."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from common import timing
from common.timing import Timing, host_time, input_sets, time_eager, time_runs

CPU = torch.device("cpu")


def test_a_timing_is_median_and_quartiles():
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5, False)
    assert Timing.of([7.0], captured=True) == Timing(7.0, 7.0, 7.0, 1, True)


@pytest.mark.parametrize(
    ("nbytes", "count"), ((1, 1024), (10**6, 240), (120 * 10**6, 4), (2**30, 4), (2**31, 2), (2**33, 1))
)
def test_input_sets_overflow_the_cache_and_not_the_memory(nbytes, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(L2_cache_size=60 * 10**6))
    sets = input_sets(lambda: (torch.randn(2),), "cuda", nbytes)
    assert len(sets) == len({float(x[0]) for (x,) in sets}) == count
    assert len(input_sets(lambda: (torch.randn(2),), "cpu", nbytes)) == 1


@pytest.mark.parametrize(("seconds", "calls", "repeats"), ((None, 10, 20), (0.03, 1, 3)))
def test_host_time_is_a_calls_and_fits_in_the_time_it_is_given(seconds, calls, repeats):
    made = []

    def call():
        made.append(1)
        time.sleep(0.01 if seconds else 0)

    result = host_time(call, CPU, seconds)
    assert len(made) == 3 + calls * repeats and result.repeats == repeats and 0 < result.us < 1e6


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


@pytest.fixture
def stand_in_for_cuda(monkeypatch):
    """A GPU whose graphs call again what was called, and on which each call of `work` takes 3 µs."""
    clock = SimpleNamespace(us=0.0, capturing=None)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.us = clock.us

        def elapsed_time(self, end):
            return (end.us - self.us) / 1e3

    class Graph:
        def replay(self):
            for call in self.calls:
                call()

    @contextlib.contextmanager
    def capture(graph):
        clock.capturing = graph.calls = []
        try:
            yield
        finally:
            clock.capturing = None

    def work(x, out=None):
        out = torch.empty_like(x) if out is None else out

        def launch():
            clock.us += 3
            out.copy_(x)

        launch() if clock.capturing is None else clock.capturing.append(launch)
        return out

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "synchronize": lambda device: None,
        "Stream": lambda device: stream, "current_stream": lambda device: stream,
        "stream": lambda s: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    clock.work = work
    return clock


def test_on_a_gpu_graphs_are_replayed_and_their_time_is_a_calls(stand_in_for_cuda):
    work, sets = stand_in_for_cuda.work, [(torch.randn(8),) for _ in range(4)]

    def uncapturable(x):
        if stand_in_for_cuda.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work(work(x))

    def on_another_stream(x):
        return work(x) if stand_in_for_cuda.capturing is None else torch.empty_like(x)

    def broken(x):
        raise ValueError

    runs = {f.__name__: (f, sets) for f in (work, uncapturable, on_another_stream, broken)}
    times = time_runs(runs, torch.device("cuda"))
    assert times["work"] == Timing(3.0, 3.0, 3.0, 50, True)
    assert times["uncapturable"] == Timing(6.0, 6.0, 6.0, 50, False)
    assert "left an output unwritten" in times["on_another_stream"]
    assert times["broken"] == "ValueError"


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
