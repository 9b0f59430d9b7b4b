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
from common.timing import Timing

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


def test_a_job_that_fails_leaves_the_others_alone(results):
    broken = Job({"shape": "a"}, fail, lambda inputs: {}, check, {}, 1)
    assert run(results, [broken, job("b")]) == 0
    assert results.notes() == ["- all: RuntimeError: no luck today (a)"] and len(results.rows) == 1
    assert run(Report("none", CPU, [], results.arguments | {"out": results.arguments["out"]}), []) == 1


def test_what_accumulates_starts_from_zeros_for_the_check_and_is_finished(results):
    def accumulate(x, out):
        out += x

    peer = Peer(accumulate, lambda x: (x + 1, torch.zeros(2, 4)), finish=lambda out: out[0])
    assert run(results, [job(peers={"peer": lambda: peer})], "peer") == 0
    assert results.rows[0]["x peer"] > 0 and results.left_out == {}


def test_rates_above_what_the_device_can_are_not_believed(results, monkeypatch):
    results.ceilings, results.device = CEILINGS, torch.device("cuda")
    times = {"ours": Timing.of([0.3]), "peer": Timing.of([0.4])}
    assert driver._believed(job(flops=10**6), times, results).keys() == {"peer"}
    assert results.notes() == ["- ours: not believed: 0.3 us are above 1.5 times the measured peak (a)"]


def test_an_interrupted_run_writes_what_it_has(results, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.run(results, [("all", "a", lambda: results.add({"shape": "a"})), ("all", "b", interrupt)])
    assert len(json.loads((tmp_path / "things_cpu.json").read_text())["rows"]) == 1


def test_without_a_gpu_or_with_an_unknown_peer_it_says_so(capsys):
    parser = driver.parser("", only=(("a", "b"), ("a",)), peers=(("torch", "two steps"), ("torch",)))
    for argv, message in (([], "needs a CUDA GPU; none found"), (["--smoke", "--peers", "jax"], "'two steps'")):
        with pytest.raises(SystemExit) as exit_info:
            driver.parse(parser, argv)
        assert exit_info.value.code == 2 and message in capsys.readouterr().err
    args, device = driver.parse(parser, ["--smoke", "--peers"])
    assert (args.only, args.peers, device.type) == (["a"], [], "cpu")


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_prints_rows_and_writes_all(tmp_path, capsys):
    results = Report("things", CPU, ["shape", "us", "x peer"], {"out": tmp_path, "n": [1, 2]})
    results.add({"shape": "1x2", "us": 1234.5, "hidden": 7})
    results.add({"shape": "1x3", "us": 0.01234, **driver.ratios(0.5, {"peer": 1.0})})
    for shape in ("a", "b", "c", "d", "e"):
        results.leave_out("peer", shape, "not here")
    results.write(tmp_path)
    lines = (tmp_path / "things_cpu.md").read_text().splitlines()
    assert lines[0] == "| shape | us | x peer |" and lines[2:4] == ["| 1x2 | 1,234 | - |", "| 1x3 | 0.0123 | 2 |"]
    assert lines[-1] == "- peer: not here (a, b, c, d, e)"
    content = json.loads((tmp_path / "things_cpu.json").read_text())
    assert content["rows"][0]["hidden"] == 7 and content["arguments"]["n"] == [1, 2]
    assert content["left out"][0]["where"] == list("abcde") and content["environment"]["torch"] == torch.__version__
    assert "| 1x3 | 0.0123 | 2 |" in capsys.readouterr().out


def test_a_backend_of_several_rows_runs_if_one_of_them_can():
    def row(backend, reason):
        return Implementation(backend, print, lambda x: reason)

    rows = [row(Backend.CUBLAS, None), row(Backend.CUBLAS, "not decoded"), row(Backend.GLUON, "one")]
    op = SimpleNamespace(table=[*rows, row(Backend.GLUON, "another"), row(Backend.TRITON, None)])
    ways = {"cublas": Backend.CUBLAS, "gluon": "another", "triton": Backend.TRITON}
    assert driver.by_backend(op, (1,), None, lambda backend: backend) == ways
