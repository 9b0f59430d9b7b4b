"""Every benchmark from end to end on tiny shapes on the CPU, and how those of layers and models make their rows."""

import re

import bench_fused
import bench_graphs
import bench_grouped_matmul
import bench_linear
import bench_matmul
import bench_memory
import bench_model
import bench_moe
import bench_permute
import bench_quantize
import pytest
from common import kernel_times
from common.kernel_times import Kernel
from common.shapes import ROUTINGS

pytestmark = pytest.mark.usefixtures("one_thread", "without_gpu")
EXPERTS = ("--shapes", "40x3x128x128", "--routings", "empty")


def left_out(content: dict, what: str) -> list[str]:
    return [entry["why"] for entry in content["left out"] if entry["what"] == what]


# Benchmark -> its options, the columns that tell its rows apart, and their values.
RUNS = {
    bench_quantize: ("--recipes nvfp4 --only both transformed", "case", {"both", "transformed"}, 4),
    bench_fused: ("", "case", set(bench_fused.CASES), 2 * len(bench_fused.CASES)),
    bench_permute: ("", "operation", set(bench_permute.OPERATIONS), len(bench_permute.OPERATIONS)),
    bench_matmul: ("", "product", set(bench_matmul.KINDS), 2 * len(bench_matmul.KINDS)),
    bench_grouped_matmul: ("", "routing", set(ROUTINGS), 4 * len(ROUTINGS) * len(bench_grouped_matmul.KINDS)),
}


@pytest.mark.parametrize("bench", RUNS, ids=lambda bench: bench.__name__)
def test_a_row_for_each_job_and_a_reason_for_what_is_not_there(bench, smoke):
    argv, column, values, count = RUNS[bench]
    content = smoke(bench, *argv.split())
    assert {row[column] for row in content["rows"]} == values and len(content["rows"]) == count
    # No other way of ours or peer is wrong, and each of them says what it needs.
    reasons = r"(\w+ )*needs? |compared|compiles|the kernels are|Triton kernels run|it quantizes|N and K must|it has no"
    # Before PyTorch 2.13 a CPU has no FP8 product.
    reasons += r"|NotImplementedError: Could not run 'aten::_scaled_mm"
    assert [e for e in content["left out"] if not re.match(reasons, e["why"])] == []
    for row in content["rows"]:
        ratios = {name for name in row if name.startswith("x ")}
        assert ratios == {f"x {name}" for name in row["peers us"]} and row["roofline us"] > 0
        assert row.get("error", 0) < 0.005


def test_chosen_backends_peers_shapes_and_recipes(smoke):
    argv = "--only output --backends reference cublas --peers bf16 --shapes 16x32x64 17x32x64 --recipes nvfp4"
    content = smoke(bench_matmul, *argv.split())
    assert [(r["by"], r["shape"], r["recipe"]) for r in content["rows"]] == [
        ("reference", f"{tokens}x32x64", "nvfp4") for tokens in (16, 17)
    ]
    row = content["rows"][0]
    assert list(row["peers us"]) == ["bf16"] and left_out(content, "cublas") and row["mnk"] == [16, 32, 64]
    assert row["TFLOP/s"] == pytest.approx(2 * 16 * 32 * 64 / row["us"] / 1e6)


LAYERS = {bench_linear: ((), 6 * 48 * 256 * 384), bench_moe: (EXPERTS, 18 * 40 * 128 * 128)}


@pytest.mark.parametrize("bench", LAYERS, ids=lambda bench: bench.__name__)
def test_a_layer_has_a_row_for_each_recipe(bench, smoke):
    argv, flops = LAYERS[bench]
    content = smoke(bench, *argv, "--seconds", "0.01", "--only", "fp8", "bf16", "torchao")
    fp8, bf16 = content["rows"][:2]
    assert (fp8["recipe"], bf16["recipe"]) == ("fp8", "bf16") and fp8["where"] == bf16["where"]
    assert fp8["x bf16"] == pytest.approx(bf16["us"] / fp8["us"]) and "x bf16" not in bf16
    assert 0 < fp8["error"] < 0.15 and bf16["error"] == 0
    assert fp8["TFLOP/s"] == pytest.approx(flops / fp8["us"] / 1e6)
    assert left_out(content, "torchao") == ["needs sm_90, got cpu"]
    if bench is bench_moe:
        assert 0 < fp8["quantize %"] < 100 and bf16["quantize %"] == 0


def test_a_layer_that_is_wrong_or_fails_is_not_timed(smoke, monkeypatch):
    def make_layer(shape, recipe, ends, original=bench_moe.make_layer):
        layer = original(shape, recipe, ends)
        if recipe == "fp8":
            step = layer.step
            layer.step = lambda x, dy: (*step(x, dy)[:-1], step(x, dy)[-1] * 1.5)
        if recipe == "nvfp4":
            raise RuntimeError("no luck today")
        return layer

    monkeypatch.setattr(bench_moe, "make_layer", make_layer)
    content = smoke(bench_moe, *EXPERTS, "--seconds", "0.01", "--only", "fp8", "nvfp4", "bf16")
    assert [row["recipe"] for row in content["rows"]] == ["bf16"]
    assert "WRONG, relative error 0.5" in left_out(content, "fp8")[0]
    assert left_out(content, "nvfp4") == ["RuntimeError: no luck today"]


def test_models_fused_and_not(smoke, tmp_path):
    recipes = ("bf16", "fp8", "fp8_fused", "fp8_fused_once")
    content = smoke(bench_model, "--fuse", "--modes", "eager", "--checkpointing", "off", "--only", *recipes)
    rows = {row["recipe"]: row for row in content["rows"]}
    assert tuple(rows) == recipes and rows["fp8"]["x bf16"] == pytest.approx(rows["bf16"]["us"] / rows["fp8"]["us"])
    for row in rows.values():
        assert min(row[column] for column in ("products ms", "other ms")) > 0
        assert (row["quantization ms"] > 0) == (row["recipe"] != "bf16")
        assert row["tokens/s"] == pytest.approx(64 / row["us"] * 1e6) and row["kernels"]
    bf16, fp8, fused, once = (row["error"] for row in rows.values())
    # Only the last one rounds elsewhere.
    assert bf16 == 0 < fused == fp8 != once and once < 0.1
    text = (tmp_path / "model_2_layers_fuse_cpu.md").read_text()
    assert text.count("### ") == 4 and "### fp8_fused_once, eager, checkpointing off: " in text


def test_ways_to_launch_a_step(smoke):
    rows = smoke(bench_graphs, "--only", "fp8", "bf16")["rows"]
    ways = [(row["way"], row["recipe"]) for row in rows]
    assert ways == [("eager", "bf16"), ("eager", "fp8"), ("compiled", "bf16"), ("compiled", "fp8")]
    assert rows[3]["x bf16"] == pytest.approx(rows[2]["us"] / rows[3]["us"])
    assert rows[3]["x eager"] == pytest.approx(rows[1]["us"] / rows[3]["us"])


def test_memory_has_a_row_for_each_variant(smoke):
    assert list(smoke(bench_memory)["rows"]) == list(bench_memory.VARIANTS)


KERNELS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
    "_matmul_fp8_kernel": "products",
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128_Bvec128_TNT": "products",
    "_quantize_fp8_kernel": "quantize",
    "_swiglu_backward_kernel": "quantize",
    "triton_poi_fused__unsafe_view_mul_quantize_both_silu_split_view_4": "compiled",
    "_transpose_quads_kernel": "transpose",
    "void pytorch_flash::flash_fwd_kernel<...>": "attention",
    "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>": "other",
}


def test_a_table_says_where_a_step_goes():
    """Kernels are sorted by name; groups in order have a sum, their longest kernels and the rest in one row."""
    assert {name: Kernel(name, 3.0, 1).kind for name in KERNELS} == KERNELS
    small = [Kernel(f"add_{i}", 1.0, 3) for i in range(kernel_times._ROWS + 2)]
    found = [Kernel("matmul", 60.0, 2), Kernel("_quantize_fp8_kernel", 26.0, 4), *small]
    title, _, *rows = kernel_times.table("fp8", found, 200.0).splitlines()
    assert title == "### fp8: 0.20 ms a step, 0.10 ms of them in kernels"
    assert rows[2] == "| **products** | all | 2 | 60.0 | 60.0 |"
    assert rows[3] == "| products | `matmul` | 2 | 60.0 | 60.0 |"
    assert rows[4] == "| **quantization** | all | 4 | 26.0 | 26.0 |"
    assert rows[6] == "| **other** | all | 42 | 14.0 | 14.0 |" and rows[-1] == "| other | 2 more | 6 | 2.0 | 2.0 |"
    assert len(rows) == 2 + 5 + kernel_times._ROWS + 1
    assert kernel_times.group_ms(found) == {"products ms": 0.06, "quantization ms": 0.026, "other ms": 0.014}
