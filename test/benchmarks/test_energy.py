"""Joules: power by looks at a counter, on a stand-in for the driver's library; and where there is none."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace

import bench_linear
import bench_matmul
import bench_model
import energy
import pytest
import torch
from environment import environment
from timing import time_runs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)
UUID, WATTS, LIMIT = "1b2c", 500.0, 650.0
UNKNOWN = 3


class Library:
    """NVML of one board, whose counter is renewed every 20 ms. broken: the functions that fail."""

    def __init__(self, *broken: str):
        self.broken = broken

    def __getattr__(self, name):
        answers = {
            "nvmlInit_v2": None,
            "nvmlDeviceGetHandleByUUID": 7,
            "nvmlDeviceGetTotalEnergyConsumption": int(time.perf_counter() // 0.02 * 0.02 * WATTS * 1e3),
            "nvmlDeviceGetEnforcedPowerLimit": int(LIMIT * 1e3),
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments):
            if name in self.broken or (name == "nvmlDeviceGetHandleByUUID" and arguments[0] != f"GPU-{UUID}".encode()):
                return UNKNOWN
            if arguments:
                assert "Handle" in name or arguments[0].value == 7
                arguments[-1]._obj.value = answers[name]
            return 0

        return call


@pytest.fixture
def driver(monkeypatch):
    """(what fails) -> a GPU and its driver; None: no library."""
    energy.board_of.cache_clear()

    def pretend(*broken, library=True, uuid=UUID):
        def load(name):
            if not library:
                raise OSError(name)
            return Library(*broken)

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    yield pretend
    energy.board_of.cache_clear()


def test_power_is_taken_between_renewals_of_the_counter():
    # 200 W: 4 J in 20 ms. Looks are late by different times, and the first and last values are cut off.
    looks = [(0.001, 0), (0.011, 0), (0.021, 4000), (0.031, 4000), (0.041, 8000), (0.061, 12000), (0.069, 12000)]
    assert energy.watts(looks) == pytest.approx(200)
    assert energy.watts(looks[:4]) is energy.watts([]) is None


def test_joules_of_a_call(driver):
    driver()
    calls = []

    def call():
        calls.append(time.perf_counter())
        time.sleep(0.005)

    start = time.perf_counter()
    spent = energy.joules(call, GPU, seconds=0.3)
    assert calls[-1] - start >= energy._SETTLE + 0.25
    # Of as long as a call took, whatever else the machine does.
    took = (calls[-1] - calls[0]) / (len(calls) - 1)
    assert spent == pytest.approx(WATTS * took, rel=0.5)
    assert energy.power_limit(GPU) == LIMIT


@pytest.mark.parametrize(
    "absent",
    ({"library": False}, {"uuid": "another"}, {"uuid": None}),
    ids=("no library", "unknown board", "no UUID"),
)
def test_without_a_board_there_is_no_figure(absent, driver):
    driver(**absent)
    assert energy.board_of(GPU) is energy.power_limit(GPU) is energy.joules(lambda: 1 / 0, GPU) is None


def test_a_board_that_counts_nothing_has_no_joules(driver):
    driver("nvmlDeviceGetTotalEnergyConsumption")
    assert energy.joules(lambda: 1 / 0, GPU) is None
    assert energy.power_limit(GPU) == LIMIT


def test_a_cpu_has_no_figure():
    assert energy.joules(lambda: 1 / 0, CPU) is energy.power_limit(CPU) is environment(CPU)["power limit W"] is None


def test_times_have_the_joules_of_one_call_of_each_run(monkeypatch):
    monkeypatch.setattr(energy, "joules", lambda call, device: 6.0)
    runs = {name: (lambda x: x + 1, [(torch.ones(1),)] * sets) for name, sets in (("two", 2), ("three", 3))}
    times = time_runs(runs, CPU, seconds=0.0, with_energy=True)
    assert [t.joules for t in times.values()] == [3.0, 2.0]
    assert time_runs(runs, CPU, seconds=0.0)["two"].joules is None


@pytest.mark.usefixtures("no_interpreter", "without_gpu", "one_thread")
@pytest.mark.parametrize("there", (True, False))
@pytest.mark.parametrize(
    ("bench", "options", "before"),
    (
        (bench_matmul, ("--only", "output", "--peers", "bf16"), "TFLOP/s"),
        (bench_linear, ("--only", "bf16", "fp8"), "TFLOP/s"),
        (bench_model, ("--only", "bf16", "--modes", "eager", "--checkpointing", "off"), "ms a step"),
    ),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_benchmarks_have_a_column_of_joules(bench, options, before, there, smoke, monkeypatch, tmp_path):
    monkeypatch.setattr(energy, "joules", lambda call, device: 0.25 if there else None)
    content = smoke(bench, "--energy", *options)
    (path,) = tmp_path.glob("*.md")
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in path.read_text().split("\n\n")[0].splitlines()
    )
    place = head.index("J")
    assert head[place - 1] == before
    assert {line[place] for line in lines} == ({"0.25"} if there else {"-"})
    if bench is bench_matmul:
        assert all(row["peers J"] == {"bf16": 0.25 if there else None} for row in content["rows"])
