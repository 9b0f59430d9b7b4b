"""Every benchmark from end to end on tiny shapes on the CPU, and what it makes of wrong and missing results."""

from __future__ import annotations

import json
from pathlib import Path

import bench_linear
import bench_matmul
import bench_model
import bench_quantize
import layers
import peers
import pytest
import report
import shapes
from timing import Timing

from torchao_blockwise import ops

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")


def run(bench, folder: Path, *argv: str) -> dict:
    """What `bench` wrote into its JSON."""
    assert bench.main(["--smoke", "--out", str(folder), *argv]) == 0
    name = bench.__name__.removeprefix("bench_")
    written = {path.name: path for path in folder.iterdir() if path.name.startswith(name)}
    stem = next(n for n in written if n.endswith(".json")).removesuffix(".json")
    pictures = {f"{stem}.png"} if name != "model" else set()
    assert written.keys() == {f"{stem}.json", f"{stem}.md"} | pictures
    content = json.loads(written[f"{stem}.json"].read_text())
    assert content["environment"]["commit"] is None or content["environment"]["commit"]
    table = written[f"{stem}.md"].read_text().split("\n\n")[0].splitlines()
    assert len(table) == 2 + len(content["rows"])
    return content


def left_out(content: dict, what: str) -> list[str]:
    return [entry["why"] for entry in content["left out"] if entry["what"] == what]


def test_quantize(tmp_path):
    content = run(bench_quantize, tmp_path, "--recipes", "fp8", "nvfp4")
    assert len(content["rows"]) == 5 * 2 * 2
    for row in content["rows"]:
        assert row["roofline us"] == pytest.approx(row["MiB"] * 2**20 / content["ceilings"]["copy"] / 1e6)
        assert row["of roofline"] == pytest.approx(row["roofline us"] / row["us"])
        assert row["TB/s"] == pytest.approx(row["MiB"] * 2**20 / row["us"] / 1e6)
        assert row["timing"]["repeats"] >= 5


def test_wrong_bits_are_not_timed(tmp_path, monkeypatch):
    quantize = ops.quantize

    def wrong(x, fmt, *, backend=None, **kwargs):
        return quantize(x if backend else x * 1.01, fmt, backend=backend, **kwargs)

    monkeypatch.setattr(ops, "quantize", wrong)
    assert bench_quantize.main(["--smoke", "--out", str(tmp_path), "--only", "rowwise"]) == 1
    content = json.loads((tmp_path / "quantize_cpu.json").read_text())
    assert content["rows"] == [] and "bits differ" in left_out(content, "ours")[0]


def test_matmul(tmp_path):
    content = run(bench_matmul, tmp_path)
    assert [row["product"] for row in content["rows"][::2]] == ["output", "grad_input", "grad_weight"]
    for row, shape in zip(content["rows"], shapes.SMOKE * 3):
        assert row["shape"] == str(shape) and row["error"] < 0.005
        flops = 2 * shape.tokens * shape.out_features * shape.in_features
        assert row["TFLOP/s"] == pytest.approx(flops / row["us"] / 1e6)
        assert row["x bf16"] == pytest.approx(row["peers us"]["bf16"] / row["us"])
        fastest = max(content["ceilings"]["fp8"], content["ceilings"]["bf16"])
        assert row["roofline us"] >= flops / fastest / 1e6
    assert left_out(content, "peer deep_gemm") and left_out(content, "peer torchao")


def test_matmul_of_chosen_backends_peers_and_shapes(tmp_path):
    argv = "--only output --backends reference cublas --peers bf16 --shapes 16x32x64 --tokens 16 17 --recipes nvfp4"
    content = run(bench_matmul, tmp_path, *argv.split(" "))
    assert [(row["by"], row["shape"]) for row in content["rows"]] == [
        ("reference", "16x32x64"),
        ("reference", "17x32x64"),
    ]
    assert list(content["rows"][0]["peers us"]) == ["bf16"] and left_out(content, "cublas")


def test_wrong_products_are_not_timed_and_failing_peers_kill_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no luck today")

    failing = peers.ProductPeer(lambda *args: args, fail, same_operands=True)
    wrong = peers.ProductPeer(lambda a_hp, b_hp, a, b: (a_hp, b_hp), lambda a, b: 2 * a @ b.t(), same_operands=True)
    found = {"cublaslt": failing, "torchao": failing._replace(prepare=fail), "tensorwise": wrong}
    original = peers.product_peer
    monkeypatch.setattr(peers, "product_peer", lambda name, *args: found.get(name) or original(name, *args))
    content = run(bench_matmul, tmp_path, "--only", "output", "--peers", "cublaslt", "torchao", "tensorwise", "bf16")
    assert len(content["rows"]) == 2 and list(content["rows"][0]["peers us"]) == ["bf16"]
    assert left_out(content, "peer cublaslt") == left_out(content, "peer torchao") == ["RuntimeError: no luck today"]
    assert "WRONG, relative error 1" in left_out(content, "peer tensorwise")[0]


def test_linear(tmp_path):
    content = run(bench_linear, tmp_path)
    rows = {(row["shape"], row["recipe"]): row for row in content["rows"]}
    for shape in shapes.SMOKE:
        fp8, bf16 = rows[str(shape), "fp8"], rows[str(shape), "bf16"]
        assert fp8["x bf16"] == pytest.approx(bf16["us"] / fp8["us"]) and "x bf16" not in bf16
        assert 0 < fp8["error"] < 0.1 and bf16["error"] == 0
        flops = 6 * shape.tokens * shape.out_features * shape.in_features
        assert fp8["TFLOP/s"] == pytest.approx(flops / fp8["us"] / 1e6)
    assert left_out(content, "torchao") == ["needs sm_90, got cpu"]


def test_peers_of_later_stages_are_added_to_rows_that_are_there(tmp_path, monkeypatch, capsys):
    """Every stage at both shapes before the next one; ratios of ours follow, and rows of a shape stay together."""
    original, stages = bench_linear.make_layer, []

    def make_layer(shape, recipe, weight, device):
        return original(shape, "bf16" if recipe == "torchao" else recipe, weight, device)

    def measure(shape, recipes, *args, run=bench_linear.measure):
        stages.append((str(shape), list(recipes)))
        run(shape, recipes, *args)

    monkeypatch.setattr(bench_linear, "make_layer", make_layer)
    monkeypatch.setattr(bench_linear, "measure", measure)
    content = run(bench_linear, tmp_path, "--only", "torchao", "bf16", "fp8", "--seconds", "0.001")
    small, smaller = map(str, shapes.SMOKE)
    assert stages == [(s, names) for names in (["bf16", "fp8"], ["torchao"]) for s in (small, smaller)]
    rows = content["rows"]
    assert [(r["shape"], r["recipe"]) for r in rows] == [
        (s, recipe) for s in (small, smaller) for recipe in ("bf16", "fp8", "torchao")
    ]
    for bf16, fp8, torchao in (rows[:3], rows[3:]):
        assert fp8["x torchao"] == pytest.approx(torchao["us"] / fp8["us"])
        assert fp8["x bf16"] == pytest.approx(bf16["us"] / fp8["us"])
        assert fp8["timing"]["host"]["repeats"] <= 5
    # As rows came, and once more whole.
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {small} | fp8 |")]
    assert [line.split(" | ")[-2] == report.MISSING for line in printed] == [True, False]


def test_a_ratio_is_of_graphs_that_took_turns(tmp_path, monkeypatch):
    """The GPU was slower when the peer ran: ours beside it counts, and the row keeps its first time."""
    original, graphs = bench_linear.make_layer, iter([{"fp8": 2.0, "bf16": 3.0}, {"fp8": 4.0, "torchao": 5.0}])

    def make_layer(shape, recipe, weight, device):
        return original(shape, "bf16" if recipe == "torchao" else recipe, weight, device)

    def time_runs(runs, device):
        times = next(graphs)
        assert runs.keys() == times.keys()
        return {name: Timing.of([us], captured=True) for name, us in times.items()}

    monkeypatch.setattr(bench_linear, "make_layer", make_layer)
    monkeypatch.setattr(layers, "time_runs", time_runs)
    argv = f"--shapes {shapes.SMOKE[1]} --only fp8 bf16 torchao"
    fp8, bf16, torchao = run(bench_linear, tmp_path, *argv.split())["rows"]
    assert [row["us"] for row in (fp8, bf16, torchao)] == [2.0, 3.0, 5.0]
    assert fp8["x bf16"] == pytest.approx(1.5) and fp8["x torchao"] == pytest.approx(1.25)


def test_a_stage_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    def measure(shape, recipes, *args, run=bench_linear.measure):
        if recipes == ["torchao"]:
            raise RuntimeError("no luck today")
        run(shape, recipes, *args)

    monkeypatch.setattr(bench_linear, "measure", measure)
    content = run(bench_linear, tmp_path, "--only", "fp8", "bf16", "torchao")
    assert len(content["rows"]) == 4 and left_out(content, "torchao") == ["RuntimeError: no luck today"]


def test_slow_peers_of_products_come_last_and_add_to_rows(tmp_path, monkeypatch):
    original, asked = peers.product_peer, []

    def product_peer(name, product, device):
        asked.append((name, product.tokens))
        return original("bf16" if name == "deep_gemm" else name, product, device)

    monkeypatch.setattr(peers, "product_peer", product_peer)
    content = run(bench_matmul, tmp_path, "--only", "output", "--peers", "deep_gemm", "bf16")
    assert asked == [("bf16", 48), ("bf16", 33), ("deep_gemm", 48), ("deep_gemm", 33)]
    assert [row["shape"] for row in content["rows"]] == list(map(str, shapes.SMOKE))
    for row in content["rows"]:
        assert row["peers us"].keys() == row["peers TFLOP/s"].keys() == {"bf16", "deep_gemm"}
        # Of the turns that they took together, not of the first.
        assert row["x deep_gemm"] > 0 and row["x bf16"] == pytest.approx(row["peers us"]["bf16"] / row["us"])


def test_model(tmp_path):
    content = run(bench_model, tmp_path, "--modes", "eager", "--only", "fp8", "bf16")
    rows = content["rows"]
    assert [(row["recipe"], row["checkpointing"]) for row in rows] == [
        ("bf16", "off"), ("bf16", "on"), ("fp8", "off"), ("fp8", "on"),
    ]  # fmt: skip
    assert rows[3]["x bf16"] == pytest.approx(rows[1]["us"] / rows[3]["us"])
    for row in rows:
        shares = [row[f"{kind} %"] for kind in (*bench_model.KINDS, "other")]
        assert sum(shares) == pytest.approx(100) and row["products %"] > 0
        assert row["tokens/s"] == pytest.approx(64 / row["us"] * 1e6) and row["kernels"]
    assert rows[0]["error"] == 0 < rows[2]["error"] < 0.1


def test_a_compiled_model(tmp_path):
    content = run(bench_model, tmp_path, "--modes", "compiled", "--only", "fp8", "--checkpointing", "on")
    assert [row["mode"] for row in content["rows"]] == ["compiled"] and content["left out"] == []
