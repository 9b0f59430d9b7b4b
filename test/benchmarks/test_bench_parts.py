"""What the benchmarks are made of: shapes, floors, reports, and peers, as far as they go on a CPU."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import bench_linear
import bench_matmul
import bench_model
import bench_moe
import bench_quantize
import errors
import layers
import peers
import pytest
import report
import roofline
import shapes
import torch
import torch.nn.functional as F
from products import KINDS, Product, error_budget, product_error
from timing import Timing
from torch import nn

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.testing import relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_the_shapes_of_the_specification_are_there():
    every = shapes.select(["all"])
    assert {s.tokens for s in every} == {64, 4096, 16384, 32768, 4097} and len(every) == len(set(every))
    weights = {(s.out_features, s.in_features) for s in every}
    assert {(10944, 2048), (576, 7168), (18432, 7168), (14336, 4096), (28672, 8192)} <= weights
    assert {shapes.name_of(s) != "" for s in every} == {True}
    assert shapes.name_of(shapes.Shape(1, 7168, 18432)) == "deepseek_v3_671b mlp.down"


def test_shapes_are_selected_by_name_or_number_once_each():
    assert shapes.select(["16384x14336x4096", "peers"]) == [shapes.PEERS[5], *shapes.PEERS[:5]]
    assert [s.tokens for s in shapes.select(["4096x2048x7168", "64x2048x7168"], tokens=[7, 8])] == [7, 8]
    llama = shapes.select(["llama_8b"], tokens=[64])
    assert len(llama) == 4 and {s.tokens for s in llama} == {64}
    with pytest.raises(ValueError, match="no shape '4096x7168'; give tokens x out x in"):
        shapes.select(["4096x7168"])


# --- rooflines --------------------------------------------------------------------------------------------------------

CEILINGS = roofline.Ceilings(copy=4.0, bf16=800.0, fp8=1250.0)


def test_a_floor_is_the_greater_of_bytes_and_operations():
    assert CEILINGS.floor_us(4 * 10**12) == pytest.approx(1e6)
    assert CEILINGS.floor_us(0, 125 * 10**12) == pytest.approx(1e5)
    assert CEILINGS.floor_us(0, 80 * 10**12, "bf16") == pytest.approx(1e5)
    assert CEILINGS.floor_us(8 * 10**6, 10**6) == pytest.approx(2.0)


def test_ceilings_follow_from_times(monkeypatch, device):
    def time_runs(runs, device, seconds):
        assert all(run(*sets[0]) is not None for run, sets in runs.values())
        return {"copy": Timing.of([1.0]), "bf16": Timing.of([2.0]), "fp8": fp8}

    monkeypatch.setattr(roofline, "time_runs", time_runs)
    flops, fp8 = 2 * roofline._SMOKE_WIDTH**3, Timing.of([0.5])
    ceilings = roofline.measure_ceilings(torch.device(device), smoke=True)
    assert ceilings.copy == pytest.approx(2 * 2**20 / 1e6)
    assert (ceilings.bf16, ceilings.fp8) == pytest.approx((flops / 2e6, flops / 0.5e6))
    fp8 = "no such hardware"
    assert roofline.measure_ceilings(torch.device(device), smoke=True).fp8 == pytest.approx(flops / 2e6)


def test_the_picture_is_drawn_whatever_there_is(tmp_path):
    series = [roofline.Series("ours", [(1.0, 0.5), (100.0, 3.0)], True), roofline.Series("none", [], False)]
    roofs = {"sloped": (0.1, 4.0), "flat": (math.inf, 5.0)}
    assert roofline.draw(tmp_path / "a.png", "t", "s", series, roofs, ("x", "y"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not roofline.draw(tmp_path / "b.png", "t", "s", series[1:], roofs, ("x", "y"))


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_prints_rows_and_writes_all(tmp_path, capsys):
    results = report.Report("things", CPU, ["shape", "us", "x peer"], report.plain({"out": tmp_path, "n": [1, 2]}))
    results.add({"shape": "1x2", "us": 1234.5, "hidden": 7})
    results.add({"shape": "1x3", "us": 0.01234, **report.ratios(0.5, {"peer": 1.0})})
    for shape in ("a", "b", "c", "d", "e"):
        results.leave_out("peer", shape, "not here")
    results.write(tmp_path)
    lines = (tmp_path / "things_cpu.md").read_text().splitlines()
    assert lines[0] == "| shape | us | x peer |" and lines[2:4] == ["| 1x2 | 1,234 | - |", "| 1x3 | 0.0123 | 2 |"]
    assert lines[-1] == "- peer: not here (a, b, c, d and 1 more)"
    content = json.loads((tmp_path / "things_cpu.json").read_text())
    assert content["rows"][0]["hidden"] == 7 and content["arguments"]["n"] == [1, 2]
    assert content["left out"][0]["where"] == list("abcde") and content["environment"]["torch"] == torch.__version__
    assert "| 1x3 | 0.0123 | 2 |" in capsys.readouterr().out


def test_rows_that_come_late_stand_where_they_belong(tmp_path):
    results = report.Report("things", CPU, ["shape", "us", "x peer"], {"out": str(tmp_path)})
    for shape in ("a", "b"):
        results.add({"shape": shape, "us": 1.0})
    results.add({"shape": "a", "us": 2.0}, after=results.rows[0])
    results.amend(results.rows[0], {"x peer": 2.0})
    wanted = ["| a | 1 | 2 |", "| a | 2 | - |", "| b | 1 | - |"]
    # Saved as it came: nothing has been written yet.
    assert (tmp_path / "things_cpu.md").read_text().splitlines()[2:] == wanted
    assert json.loads((tmp_path / "things_cpu.json").read_text())["rows"][0]["x peer"] == 2.0


def test_quick_peers_come_first_then_each_slow_one():
    assert report.in_stages(["slow", "a", "slower", "b"], ("slow", "slower")) == [["a", "b"], ["slow"], ["slower"]]
    assert report.in_stages(["slow"], ("slow",)) == [[], ["slow"]] and report.in_stages([], ()) == [[]]


def test_layers_are_measured_ours_first_and_compiled_last():
    assert layers.stages(bench_linear.RECIPES) == [
        ["fp8", "fp8_primary", "bf16", "nvfp4"],
        ["torchao"], ["torchao_tensorwise"], ["torchao_rowwise"],
    ]  # fmt: skip
    assert layers.stages(bench_moe.DEFAULT_RECIPES) == [
        ["fp8", "fp8_primary", "bf16"], ["torchao"], ["bf16_compiled"],
    ]  # fmt: skip
    assert layers.stages(["torchao_rowwise"]) == [["torchao_rowwise"]] and layers.stages([]) == []


@pytest.mark.parametrize(("seconds", "calls", "repeats"), ((None, 10, 20), (1.0, 10, 10), (0.01, 1, 3), (9.0, 10, 20)))
def test_loops_fit_in_the_time_they_are_given(seconds, calls, repeats, monkeypatch):
    monkeypatch.setattr(layers, "time_eager", lambda run, device, **options: Timing.of([10_000.0]))
    assert layers._few_enough(lambda: None, CPU, 10, 20, seconds) == {"calls": calls, "repeats": repeats}


def test_errors_are_relative_to_what_was_expected(monkeypatch):
    expected = torch.randn(7, 5, dtype=torch.bfloat16)
    actual = expected.float() * 1.01
    monkeypatch.setattr(errors, "_PIECE", 8)
    assert errors.relative_error(actual, expected) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(actual.t(), expected.t()) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(expected, expected) == 0 == errors.relative_error(expected[:0], expected[:0])
    actual[6, 4] = math.nan
    assert math.isnan(errors.relative_error(actual, expected))
    with pytest.raises(ValueError, match=r"shapes differ, got \[5, 7\] and \[7, 5\]"):
        errors.relative_error(actual.t(), expected)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("bench", (bench_quantize, bench_linear, bench_model), ids=lambda m: m.__name__)
def test_without_a_gpu_it_says_so(bench, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench.main([])
    assert exit_info.value.code == 2 and "needs a CUDA GPU; none found" in capsys.readouterr().err


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(peers, "need_capability", lambda *args, **kwargs: None)


def problem(kind, tokens=256, n=384, k=256, device=CPU):
    torch.manual_seed(0)
    product = Product(kind, tokens, n, k)
    hp = product.high_precision(device)
    return product, hp, product.quantize(*hp)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("bf16", "tensorwise"))
def test_peers_that_quantize_by_themselves_compute_the_same_product(name, kind, device):
    product, hp, operands = problem(kind, device=torch.device(device))
    peer = peers.product_peer(name, product, torch.device(device))
    assert product_error(peer.run(*peer.prepare(*hp, *operands)), *operands) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_cublaslt_gets_what_our_own_call_gives_it(kind, any_device, monkeypatch):
    """K of five blocks, so that square scales are padded; they lie along K, one-row scales along rows."""
    calls = []
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **kwargs: calls.append((args, kwargs)) or torch.empty(0))
    product, hp, (a, b) = problem(kind, tokens=640, n=640, k=640)
    peer = peers.product_peer("cublaslt", product, CPU)
    peer.run(*peer.prepare(*hp, a, b))
    theirs = calls.pop()[0]
    types = F.ScalingType
    one_row = kind == "grad_weight"
    assert theirs[0] is a.qdata and theirs[1].t().data_ptr() == b.qdata.data_ptr()
    assert theirs[2].stride() == (1, a.qdata.shape[0]) and torch.equal(theirs[2], a.scale.t())
    assert theirs[3] is types.BlockWise1x128
    assert theirs[5] is (types.BlockWise1x128 if one_row else types.BlockWise128x128)
    assert torch.equal(theirs[4], b.scale.t() if one_row else F.pad(b.scale, (0, 3), value=1.0).t())
    assert theirs[4].stride(0) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_torchao_multiplies_our_operands(kind, any_device, monkeypatch, device):
    """Its kernel with one tile size, in Triton's interpreter without a GPU, reads our scales as they are laid out."""
    product, hp, operands = problem(kind, device=torch.device(device))
    kernels = peers.torchao_kernels()
    for name in ("triton_fp8_gemm_1x128_128x128_kernel", "triton_fp8_gemm_1x128_128x1_kernel"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernel, "configs", [c for c in kernel.configs if c.kwargs["BLOCK_SIZE_M"] == 128][:1])
    peer = peers.product_peer("torchao", product, torch.device(device))
    out = peer.run(*peer.prepare(*hp, *operands))
    # The interpreter rounds to bf16 by cutting off.
    assert product_error(out, *operands) < 2 * error_budget(product.mnk[2])


@pytest.mark.parametrize("kind", KINDS)
def test_deep_gemm_gets_its_scale_layouts(kind, any_device, monkeypatch):
    """A stand-in that reads scales as DeepGEMM documents them: [M, K/128] by columns, [N/128, K/128] or [N, K/128]."""

    def fp8_gemm_nt(a, b, d, c=None, recipe=None):
        (a, a_scale), (b, b_scale) = a, b
        one_row = recipe == (1, 1, 128)
        assert recipe in (None, (1, 1, 128)) and a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0
        assert one_row == (d.dtype is torch.float32) == (c is d)
        rows = b_scale if one_row else b_scale.repeat_interleave(128, 0)
        wide = [s.repeat_interleave(128, 1) for s in (a_scale, rows)]
        product = (a.float() * wide[0][:, : a.shape[1]]) @ (b.float() * wide[1][: b.shape[0], : b.shape[1]]).t()
        d.copy_(product + (c if c is not None else 0))

    monkeypatch.setattr(peers, "_import_deep_gemm", lambda: SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    product, hp, operands = problem(kind)
    peer = peers.product_peer("deep_gemm", product, CPU)
    arguments = peer.prepare(*hp, *operands)
    out = peer.run(*arguments)
    assert product_error(arguments[-1] if out is None else out, *operands) < error_budget(product.mnk[2])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    (
        ("torchao", (4097, 256, 256), "M, N and K must be multiples of 128, got 4097, 256, 256"),
        ("cublaslt", (4097, 256, 256), "rows of 1x128 operands must be multiples of 4, got 4097"),
        ("tensorwise", (64, 250, 256), "N and K must be multiples of 16, got 250, 256"),
        ("deep_gemm", (4097, 256, 256), "rows of scales, for their copies by TMA, must be multiples of 4, got 4097"),
    ),
)
def test_a_peer_says_what_it_cannot(name, shape, message, any_device, monkeypatch):
    monkeypatch.setattr(peers, "_import_deep_gemm", lambda: None)
    with pytest.raises(peers.Unavailable, match=message):
        peers.product_peer(name, Product("output", *shape), CPU)


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    peers._why_no_deep_gemm.cache_clear()
    with pytest.raises(peers.Unavailable, match="pip install sgl-deep-gemm"):
        peers._import_deep_gemm()
    peers._why_no_deep_gemm.cache_clear()


def test_a_peer_whose_import_kills_the_process_is_a_missing_peer(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    done = SimpleNamespace(returncode=-11, stderr="")
    monkeypatch.setattr(peers.subprocess, "run", lambda *args, **kwargs: done)
    peers._why_no_deep_gemm.cache_clear()
    with pytest.raises(peers.Unavailable, match="exit status -11; in libstdc"):
        peers._import_deep_gemm()
    peers._why_no_deep_gemm.cache_clear()


def test_variants_of_torchao_that_are_the_same_code_are_tried_once():
    kernel = peers.torchao_kernels().triton_fp8_blockwise_act_quant_lhs_kernel
    assert len(kernel.configs) == 15 and len({c.num_stages for c in kernel.configs}) == 1
    assert {(c.num_warps, c.kwargs["NUM_GROUPS"]) for c in kernel.configs} == {
        (w, g) for w in (2, 4, 8) for g in (2, 16, 32, 64, 128)
    }
    kernels = vars(peers.torchao_kernels()).values()
    tuned = [kernel for kernel in kernels if hasattr(kernel, "configs")]
    assert len(tuned) >= 6 and {kernel.do_bench for kernel in tuned} == {peers._brief_bench}


@pytest.mark.parametrize("recipe", ("bf16", *layers.OURS, "torchao_tensorwise", "torchao_rowwise"))
def test_a_converted_layer_computes_what_bf16_does(recipe, any_device):
    torch.manual_seed(0)
    weight = torch.randn(256, 128, dtype=torch.bfloat16) / 11
    x, dy = (torch.randn(64, width, dtype=torch.bfloat16) for width in (128, 256))
    x.requires_grad_()
    expected = bench_linear.make_layer(shapes.Shape(64, 256, 128), "bf16", weight, CPU).step(x, dy)
    try:
        layer = bench_linear.make_layer(shapes.Shape(64, 256, 128), recipe, weight, CPU)
        got = layer.step(x, dy)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torchao has no {recipe} without a GPU: {error}")
    assert max(relative_error(a, b) for a, b in zip(got, expected)) < bench_linear._BUDGETS[recipe]


def test_a_step_quantizes_the_weight_in_forward_and_in_backward():
    from helpers import weight_calls

    weight = torch.ones(256, 128, dtype=torch.bfloat16)
    layer = bench_linear.make_layer(shapes.Shape(64, 256, 128), "fp8", weight, CPU)
    x, dy = torch.ones(64, 128, dtype=torch.bfloat16).requires_grad_(), torch.ones(64, 256, dtype=torch.bfloat16)
    with weight_calls() as calls:
        layer.step(x, dy)
    assert (calls.quantize, calls.columnwise) == (2, 1)


def test_recipes_of_ours_in_fp8_have_the_same_weights():
    weight, x, dy = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((256, 128), (64, 128), (64, 256)))
    steps = [
        bench_linear.make_layer(shapes.Shape(64, 256, 128), recipe, weight, CPU).step(x.requires_grad_(), dy)
        for recipe in ("fp8", "fp8_primary")
    ]
    assert all(torch.equal(a, b) for step in steps[1:] for a, b in zip(step, steps[0], strict=True))


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4"))
@pytest.mark.parametrize("case", bench_quantize.CASES)
def test_bytes_that_must_move_are_those_of_inputs_and_outputs(case, recipe):
    # Rows that need no padding, which is not counted.
    job = bench_quantize.job(case, 224, 320, recipe, CPU)
    arguments = job.make()
    results = job.run(*arguments)
    moved = sum(t.nbytes for t in bench_quantize_tensors((arguments, results)))
    # The scale of a tensor is read with it and counted once; NVFP4 reads the input twice.
    again = arguments[0].nbytes if recipe == "nvfp4" and case != "transpose" else 0
    assert job.nbytes == moved + again


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4"))
@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_those_of_layers(kind, recipe):
    """Along ragged tokens a payload's rows are padded to 16 bytes; the product is that of the plain operands."""
    product = Product(kind, 41, 64, 96, recipe)
    hp = product.high_precision(CPU)
    plain, padded = product.quantize(*hp), bench_matmul.operands(product, *hp)
    if kind == "grad_weight":
        assert [x.qdata.shape[1] * x.qdata.element_size() % 16 for x in padded] == [0, 0]
        assert all(x.qdata.is_contiguous() for x in padded)
    assert (
        product_error(ops.matmul(*padded, out_dtype=torch.float32), *plain if kind != "grad_weight" else padded) < 1e-5
    )
    assert product_error(ops.matmul(*plain, out_dtype=torch.float32), *plain) < 1e-5


def bench_quantize_tensors(x):
    """The tensors in nested tuples, which hold names too."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for item in x for t in bench_quantize_tensors(item)] if isinstance(x, tuple) else []


def test_bits_are_compared_as_bits():
    q = ops.quantize(torch.randn(4, 256), FP8_1X128).rowwise
    assert bench_quantize.same_bits((q, q), (q, q))
    assert not bench_quantize.same_bits(q, q._replace(format_name=FP8_128X128.name))
    assert bench_quantize.same_bits((torch.tensor(math.nan),), (torch.tensor(math.nan),))
    other = q._replace(scale=q.scale.clone())
    other.scale[0, 0] *= 1.0000001
    assert not bench_quantize.same_bits(q, other)
    assert not bench_quantize.same_bits(torch.zeros(2), -torch.zeros(2))
    assert not bench_quantize.same_bits(torch.zeros(2), torch.zeros(3)) and not bench_quantize.same_bits(q, None)


def test_a_peers_payload_is_compared_however_it_is_stored():
    x = torch.randn(256, 384)
    q, qt = ops.quantize(x, FP8_1X128, columnwise=True)
    for peer in ((q.qdata, q.scale), (q.qdata.t(), q.scale)):
        assert bench_quantize.payload_agrees(peer, (q, qt))
        assert not bench_quantize.payload_agrees(peer, (None, qt))
    other = ops.quantize(x * 1.5, FP8_1X128).rowwise
    other.qdata.view(torch.uint8)[:2] ^= 1
    assert not bench_quantize.payload_agrees(other, q)


KERNELS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNT": "products",
    "_matmul_fp8_kernel": "products",
    "_quantize_fp8_kernel": "quantise",
    "_transpose_bytes_kernel": "transpose",
    "void pytorch_flash::flash_fwd_kernel<...>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
    "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>": "optimizer",
    "triton_poi_fused_mul_silu_0": "compiled",
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>": "other",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kernels_are_told_apart_by_name(name, kind):
    shares = bench_model.split_of([(name, 3.0)])
    assert [k for k, share in shares.items() if share] == [kind] and shares[kind] == 1.0


def test_the_stack_is_llamas():
    with torch.device("meta"):
        layer = bench_model.Block(bench_model.Config())
    weights = {name: tuple(m.weight.shape) for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    assert weights == {
        "attention.qkv": (6144, 4096), "attention.output": (4096, 4096),
        "mlp.gate_up": (28672, 4096), "mlp.down": (4096, 14336),
    }  # fmt: skip
