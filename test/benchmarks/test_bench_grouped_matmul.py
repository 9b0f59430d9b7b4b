"""bench_grouped_matmul.py on tiny shapes on the CPU: what it checks, measures and leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import bench_grouped_matmul as bench
import experts
import grouped_peers
import pytest
import torch
from bench_grouped_matmul import KINDS, GroupedProduct
from experts import ROUTINGS

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, Operand

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")
CPU = torch.device("cpu")


def run(folder: Path, *argv: str, code: int = 0) -> dict:
    assert bench.main(["--smoke", "--out", str(folder), *argv]) == code
    return json.loads((folder / "grouped_matmul_cpu.json").read_text())


def left_out(content: dict, what: str) -> list[str]:
    return [entry["why"] for entry in content["left out"] if entry["what"] == what]


def test_every_product_shape_and_routing(tmp_path):
    content = run(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    rows = content["rows"]
    wanted = [
        (kind, str(shape), routing, weight)
        for kind in KINDS
        for shape in experts.SMOKE
        for routing in ROUTINGS
        for weight in shape.weights
    ]
    assert [(r["product"], r["shape"], r["routing"], r["weight"]) for r in rows] == wanted
    shapes = {str(shape): shape for shape in experts.SMOKE}
    for row in rows:
        shape = shapes[row["shape"]]
        _, n, k = shape.weights[row["weight"]]
        assert sum(row["sizes"]) == shape.tokens and len(row["sizes"]) == shape.experts
        assert row["TFLOP/s"] == pytest.approx(2 * shape.tokens * n * k / row["us"] / 1e6)
        assert row["error"] < 0.005
        assert row["x bf16"] == pytest.approx(row["peers us"]["bf16"] / row["us"])
    assert left_out(content, "peer deep_gemm") and left_out(content, "peer torchao")


def test_nvfp4_and_chosen_backends(tmp_path):
    argv = "--recipes nvfp4 --backends reference gluon --shapes 20x3x16x32 --routings empty --peers bf16"
    content = run(tmp_path, *argv.split(" "))
    assert {row["by"] for row in content["rows"]} == {"reference"} and len(content["rows"]) == 8
    assert {row["recipe"] for row in content["rows"]} == {"nvfp4"} and left_out(content, "gluon")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_group_is_seen(kind):
    """Each of the three groups that are looked at, and what empty groups must be."""
    product = GroupedProduct(kind, (0, 3, 20, 0, 9), 32, 48)
    ends = torch.tensor([0, 3, 23, 23, 32], dtype=torch.int32)
    a, b = product.quantize(*product.high_precision(CPU), ends)
    out = ops.grouped_matmul(a, b, ends, along=product.along, out_dtype=torch.float32)
    assert product.error(out, a, b) < 1e-5
    for g, rows in ((1, slice(0, 3)), (2, slice(3, 23)), (4, slice(23, 32)), (0, None)):
        wrong = out.clone()
        if product.along == "k":
            wrong[g] += 1
        elif rows is not None:
            wrong[rows] *= 1.1
        else:
            continue
        assert product.error(wrong, a, b) > 0.05


def test_wrong_products_are_not_timed(tmp_path, monkeypatch):
    right = ops.grouped_matmul
    monkeypatch.setattr(ops, "grouped_matmul", lambda *args, **options: 1.1 * right(*args, **options))
    content = run(tmp_path, "--only", "output", "--routings", "balanced", code=1)
    assert content["rows"] == [] and "WRONG, relative error 0.1" in left_out(content, "reference")[0]


def test_a_peer_that_fails_kills_nothing(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no luck today")

    failing = grouped_peers.GroupedPeer(lambda *arguments: arguments, fail, same_operands=True)
    monkeypatch.setattr(grouped_peers, "grouped_peer", lambda name, *args: failing)
    content = run(tmp_path, "--only", "grad_weight", "--routings", "skewed", "--peers", "torchao")
    assert len(content["rows"]) == 4 and left_out(content, "peer torchao") == ["RuntimeError: no luck today"]


def test_slow_peers_come_last_and_add_to_rows(tmp_path, monkeypatch):
    original, asked = grouped_peers.grouped_peer, []

    def grouped_peer(name, product, device):
        asked.append((name, product.out_features))
        return original("bf16" if name == "deep_gemm" else name, product, device)

    monkeypatch.setattr(grouped_peers, "grouped_peer", grouped_peer)
    argv = "--only output --shapes 20x3x16x32 --routings empty --peers deep_gemm bf16 torchao"
    content = run(tmp_path, *argv.split())
    names = ("bf16", "deep_gemm", "torchao")
    assert asked == [(name, width) for name in names for width in (32, 32)]
    assert [row["weight"] for row in content["rows"]] == ["gate_up", "down"] and left_out(content, "peer torchao")
    for row in content["rows"]:
        assert row["peers us"].keys() == row["peers TFLOP/s"].keys() == {"bf16", "deep_gemm"}
        assert row["x deep_gemm"] > 0 and row["x bf16"] == pytest.approx(row["peers us"]["bf16"] / row["us"])


def test_bytes_that_must_move():
    product = GroupedProduct("output", (5, 0, 3), 256, 128)
    weights = 2 * FP8_128X128.nbytes(256, 128)
    assert product.nbytes() == FP8_1X128.nbytes(8, 128) + weights + 8 * 256 * 2
    gradients = 3 * 256 * 128 * 2
    quantised = GroupedProduct("grad_weight", (5, 0, 3), 256, 128)
    assert quantised.nbytes() == FP8_1X128.nbytes(256, 8) + FP8_1X128.nbytes(128, 8) + gradients
    assert GroupedProduct("grad_weight_quantised", (5, 0, 3), 256, 128).nbytes() == 8 * (256 + 128) * 2 + gradients


def test_no_gpu_no_figures(capsys):
    with pytest.raises(SystemExit):
        bench.main([])
    assert "needs a CUDA GPU" in capsys.readouterr().err


class KGrouped:
    """DeepGEMM's k_grouped_fp8_gemm_nt_contiguous by its words: groups one behind the other, added to what is there."""

    @staticmethod
    def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c):
        (a, a_scale), (b, b_scale) = a, b
        groups, m, n = d.shape
        assert c is d and d.dtype == torch.float32 and grouped_layout.tolist() == ks and len(ks) == groups
        assert a.numel() == m * sum(ks) and b.numel() == n * sum(ks) and all(k % 128 == 0 for k in ks)
        assert a_scale.shape == (sum(ks) // 128, m) and b_scale.shape == (sum(ks) // 128, n)
        at = 0
        for g, k in enumerate(ks):
            blocks = slice(at // 128, (at + k) // 128)
            x = Operand(a[m * at : m * (at + k)].view(m, k), a_scale[blocks], None, FP8_1X128.name)
            y = Operand(b[n * at : n * (at + k)].view(n, k), b_scale[blocks], None, FP8_1X128.name)
            ops.add_matmul_(d[g], x, y)
            at += k


def test_what_deep_gemm_is_given_along_k():
    product = GroupedProduct("grad_weight", (0, 3, 150, 0, 9), 32, 48)
    ends = torch.tensor(product.sizes).cumsum(0).int()
    first, second = product.high_precision(CPU)
    a, b = product.quantize(first, second, ends)
    arguments = grouped_peers._k_grouped_arguments(first, second, ends, a, b)
    assert grouped_peers._run_k_grouped(KGrouped)(*arguments) is None
    assert product.error(arguments[-1], a, b) < 1e-5
