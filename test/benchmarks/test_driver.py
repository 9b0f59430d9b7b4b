"""The driver of the benchmarks with jobs that do little: what it checks, times, compares, leaves out and writes."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import driver
from common.driver import Job, Peer
from common.errors import Unavailable, Wrong
from common.report import Report
from common.roofline import Ceilings

from torchao_blockwise.ops.backend import Backend, Implementation

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")
CPU = torch.device("cpu")
CEILINGS = Ceilings(copy=1.0, bf16=1.0, fp8=2.0)


def add(x):
    return x + 1


def fail(*arguments):
    raise RuntimeError("no luck today\nat line 3")


def check(out, inputs, peer):
    if not torch.equal(out, inputs[0] + 1):
        raise Wrong("not one more")
    return 0.25


def job(shape: str = "a", ours=add, peers=None, flops: int = 0) -> Job:
    ways = ours if isinstance(ours, dict) else {"ours": ours}
    return Job({"shape": shape}, lambda: (torch.ones(4),), lambda inputs: ways, check, peers or {}, 1000, flops)


@pytest.fixture
def results(tmp_path, monkeypatch):
    columns = ["shape", "by", "us"]
    made = Report("things", CPU, columns, {"out": tmp_path, "smoke": True})
    monkeypatch.setattr(made, "measure_ceilings", lambda: setattr(made, "ceilings", CEILINGS))
    return made


def run(results, jobs, *names) -> int:
    return driver.run_jobs(results, jobs, names)


def test_a_row_has_times_rates_floors_and_ratios(results):
    peers = {"peer": partial(Peer, add)}
    rows = []
    for flops in (0, 10**6):
        results.rows = []
        assert run(results, [job(peers=peers, flops=flops)], "peer") == 0
        rows += results.rows
    moving, multiplying = rows
    for row in rows:
        assert row["by"] == "ours" and row["timing"]["repeats"] >= 5
        assert row["x peer"] == pytest.approx(row["peers us"]["peer"] / row["us"])
        assert row["of roofline"] == pytest.approx(row["roofline us"] / row["us"])
    assert moving["MiB"] == 1000 / 2**20 and moving["TB/s"] == pytest.approx(1000 / moving["us"] / 1e6)
    assert moving["roofline us"] == pytest.approx(1e-3) and "error" not in moving
    assert multiplying["TFLOP/s"] == pytest.approx(1 / multiplying["us"]) and multiplying["error"] == 0.25
    assert multiplying["roofline us"] == pytest.approx(0.5) and multiplying["intensity"] == 1000
    assert multiplying["peers TFLOP/s"]["peer"] == pytest.approx(1 / multiplying["peers us"]["peer"])


def test_what_is_wrong_or_fails_is_not_timed_and_kills_nothing(results):
    peers = {
        "peer": partial(Peer, add),
        "wrong": partial(Peer, lambda x: x + 2),
        "failing": partial(Peer, fail),
        "unprepared": partial(Peer, add, fail),
        "broken": fail,
        "missing": partial(raise_, Unavailable("not here")),
    }
    ways = {"right": add, "off": lambda x: x, "bad": fail, "none": "needs a GPU"}
    assert run(results, [job("a", ways, peers), job("b", lambda x: x)], *peers) == 0
    assert [(row["shape"], row["by"]) for row in results.rows] == [("a", "right")]
    assert results.rows[0]["peers us"].keys() == {"peer"}
    luck, wrong = ["RuntimeError: no luck today"], ["WRONG, not one more"]
    why = {name: [w for n, w in results.left_out if n == name] for name, _ in results.left_out}
    assert why == {
        "peer wrong": wrong, "peer failing": luck, "peer unprepared": luck, "peer broken": luck,
        "peer missing": ["not here"], "off": wrong, "bad": luck, "none": ["needs a GPU"], "ours": wrong,
    }  # fmt: skip


def raise_(error):
    raise error


def test_what_accumulates_starts_from_zeros_for_the_check_and_is_finished(results):
    def accumulate(x, out):
        out += x

    peer = Peer(accumulate, lambda x: (x + 1, torch.zeros(2, 4)), finish=lambda out: out[0])
    assert run(results, [job(peers={"peer": lambda: peer})], "peer") == 0
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
