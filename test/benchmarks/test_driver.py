"""The driver of the benchmarks with jobs that do little: what it checks, times, compares, leaves out and writes."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import driver, timing
from common.driver import Job, Peer
from common.errors import Unavailable, Wrong
from common.report import Report
from common.roofline import Ceilings
from common.timing import input_sets, time_eager, time_runs

from torchao_blockwise.ops.backend import Backend, Implementation

CPU = torch.device("cpu")


def add(x):
    return x + 1


def fail(*arguments):
    raise RuntimeError("no luck today\nat line 3")


def missing():
    raise Unavailable("not here")


def check(out, inputs, peer):
    if not torch.equal(out, inputs[0] + 1):
        raise Wrong("not one more")
    return 0.25


def job(shape: str = "a", ours=add, peers=None, flops: int = 0) -> Job:
    ways = ours if isinstance(ours, dict) else {"ours": ours}
    return Job({"shape": shape}, lambda: (torch.ones(4),), lambda inputs: ways, check, peers or {}, 1000, flops)


@pytest.fixture
def results(tmp_path, monkeypatch, one_thread, without_gpu):
    made = Report("things", CPU, ["shape", "by", "us"], {"out": tmp_path, "smoke": True})
    ceilings = Ceilings(copy=1.0, bf16=1.0, fp8=2.0)
    monkeypatch.setattr(made, "measure_ceilings", lambda: setattr(made, "ceilings", ceilings))
    return made


def test_a_row_has_times_rates_floors_and_ratios(results):
    rows = []
    for flops in (0, 10**6):
        results.rows = []
        assert driver.measure_jobs(results, [job(peers={"peer": partial(Peer, add)}, flops=flops)], ["peer"]) == 0
        rows += results.rows
    moving, multiplying = rows
    for row in rows:
        assert row["by"] == "ours" and row["timing"]["repeats"] >= 5
        assert row["x peer"] == pytest.approx(row["peers us"]["peer"] / row["us"])
        assert row["of roofline"] == pytest.approx(row["roofline us"] / row["us"])
    assert moving["MiB"] == 1000 / 2**20 and moving["TB/s"] == pytest.approx(1000 / moving["us"] / 1e6)
    assert moving["roofline us"] == pytest.approx(1e-3) and "error" not in moving
    assert multiplying["TFLOP/s"] == pytest.approx(1 / multiplying["us"]) and multiplying["error"] == 0.25
    assert multiplying["roofline us"] == pytest.approx(0.5)


def test_what_is_wrong_or_fails_is_not_timed_and_kills_nothing(results):
    peers = {
        "peer": partial(Peer, add),
        "wrong": partial(Peer, lambda x: x + 2),
        "failing": partial(Peer, fail),
        "unprepared": partial(Peer, add, fail),
        "broken": fail,
        "missing": missing,
    }
    ways = {"right": add, "off": lambda x: x, "bad": fail, "none": "needs a GPU"}
    assert driver.measure_jobs(results, [job("a", ways, peers), job("b", lambda x: x)], [*peers]) == 0
    assert [(row["shape"], row["by"]) for row in results.rows] == [("a", "right")]
    assert results.rows[0]["peers us"].keys() == {"peer"}
    luck, wrong = ["RuntimeError: no luck today"], ["WRONG, not one more"]
    why = {name: [w for n, w in results.left_out if n == name] for name, _ in results.left_out}
    assert why == {
        "peer wrong": wrong, "peer failing": luck, "peer unprepared": luck, "peer broken": luck,
        "peer missing": ["not here"], "off": wrong, "bad": luck, "none": ["needs a GPU"], "ours": wrong,
    }  # fmt: skip


def test_what_accumulates_starts_from_zeros_for_the_check_and_is_finished(results):
    def accumulate(x, out):
        out += x

    peer = Peer(accumulate, lambda x: (x + 1, torch.zeros(2, 4)), finish=lambda out: out[0])
    assert driver.measure_jobs(results, [job(peers={"peer": lambda: peer})], ["peer"]) == 0
    assert results.rows[0]["x peer"] > 0 and results.left_out == {}


def test_an_interrupted_run_writes_what_it_has(results, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.run(results, [("all", "a", lambda: results.add({"shape": "a"})), ("all", "b", interrupt)])
    assert len(json.loads((tmp_path / "things_cpu.json").read_text())["rows"]) == 1


def test_a_backend_of_several_rows_runs_if_one_of_them_can():
    def row(backend, reason):
        return Implementation(backend, print, lambda x: reason)

    rows = [row(Backend.CUBLAS, None), row(Backend.CUBLAS, "not decoded"), row(Backend.GLUON, "one")]
    op = SimpleNamespace(table=[*rows, row(Backend.GLUON, "another"), row(Backend.TRITON, None)])
    ways = {"cublas": Backend.CUBLAS, "gluon": "another", "triton": Backend.TRITON}
    assert driver.by_backend(op, (1,), None, lambda backend: backend) == ways


@pytest.mark.parametrize(
    ("nbytes", "count"), ((1, 1024), (10**6, 240), (120 * 10**6, 4), (2**30, 4), (2**31, 2), (2**33, 1))
)
def test_input_sets_overflow_the_cache_and_not_the_memory(nbytes, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(L2_cache_size=60 * 10**6))
    sets = input_sets(lambda: (torch.randn(2),), "cuda", nbytes)
    assert len(sets) == len({float(x[0]) for (x,) in sets}) == count
    assert len(input_sets(lambda: (torch.randn(2),), "cpu", nbytes)) == 1


def test_runs_are_timed_side_by_side():
    turns, sets = [], [(torch.ones(4),)]
    runs = {name: (lambda x, name=name: turns.append(name) or x + 1, sets) for name in ("a", "b")}
    times = time_runs(runs, CPU, seconds=0.0)
    assert times["a"].us > 0 and times["a"].repeats == times["b"].repeats == 5
    assert turns[-6:] == ["a", "b"] * 3


def test_an_output_that_no_replay_writes_is_found():
    out = torch.zeros(300)
    timing._check_written(SimpleNamespace(replay=lambda: out.fill_(1.5)), [out])
    with pytest.raises(RuntimeError, match="left an output unwritten"):
        timing._check_written(SimpleNamespace(replay=lambda: None), [(torch.zeros(3), out)])


@pytest.mark.gpu
def test_gpu_times_are_near_those_of_a_long_loop_and_what_cannot_be_captured_fails():
    device = torch.device("cuda")
    sets = input_sets(lambda: (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16),), device)
    times = time_runs({"copy": (torch.clone, sets), "matmul": (lambda x: x @ x, sets)}, device)
    uncaptured = time_runs({"sum": (lambda x: x.sum().item(), sets)}, device)
    assert isinstance(uncaptured["sum"], str)
    # 64 MiB moved and 137 GFLOP: no GPU does that faster than 10 TB/s and 5 PFLOP/s.
    assert times["copy"].us > 64 * 2**20 / 10e6 and times["matmul"].us > 2 * 4096**3 / 5e9

    def agree() -> bool:
        x = sets[0][0]
        graph = time_runs({"matmul": (lambda x: x @ x, sets)}, device)["matmul"].us
        return graph == pytest.approx(time_eager(lambda: x @ x, device).us, rel=0.3)

    # Others, tests among them, may use the GPU at the same time: the two need to agree once.
    assert any(agree() for _ in range(5))
