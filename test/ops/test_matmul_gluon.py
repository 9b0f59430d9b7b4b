"""The Hopper kernels: simulated on any machine, and as they are on the GPU."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import gluon_simulator as simulator
import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.ops.gemm.builds import BUILDS as ALL_BUILDS
from torchao_blockwise.ops.gemm.builds import choose_build

gluon = pytest.importorskip("torchao_blockwise.ops.gemm.plain.kernels_gluon")
pipeline = pytest.importorskip("torchao_blockwise.ops.gemm.gluon_pipeline")

PAIRS = {"square": FP8_128X128, "one-row": FP8_1X128}


def simulate(monkeypatch, kernel=pipeline.matmul_fp8_kernel) -> simulator.Launcher:
    """Let products launch `kernel` in the simulator."""
    launcher = simulator.Launcher(kernel, output=5)
    monkeypatch.setattr(gluon, "matmul_fp8_kernel", launcher)
    monkeypatch.setattr(gluon, "multiprocessors", launcher.multiprocessors)
    return launcher


@pytest.fixture
def simulated(monkeypatch):
    return simulate(monkeypatch)


def operands(m: int, n: int, k: int, pair: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    # Blocks of very different size: a scale in the wrong place is seen.
    x *= torch.logspace(-2, 2, m)[:, None] * torch.logspace(-1, 1, k)[None, :]
    w *= torch.logspace(1, -1, n)[:, None]
    return tuple(ops.quantize(t, fmt, backend="reference").rowwise for t, fmt in ((x, FP8_1X128), (w, PAIRS[pair])))


def relative_error(out, a, b, start=0.0):
    """Largest error of an element, relative to the sum of the magnitudes that it is the sum of."""
    wanted = ops.matmul(a, b, out_dtype=torch.float32, backend="reference") + start

    def magnitude(x):
        return x._replace(qdata=x.qdata.float().abs().to(x.qdata.dtype))

    magnitudes = ops.matmul(magnitude(a), magnitude(b), out_dtype=torch.float32, backend="reference")
    return ((out.float() - wanted).abs() / (magnitudes + abs(start)).clamp_min(1e-30)).max().item()


# fp32 sums of exact products in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

SHAPES = [(1, 1, 1), (64, 256, 128), (65, 130, 129), (300, 272, 400), (7, 576, 1100), (513, 257, 640)]
BUILDS = {
    "256x128-pair": ALL_BUILDS[0],
    "256x128": ALL_BUILDS[1],
    "128x128": ALL_BUILDS[2],
    "64x64": ALL_BUILDS[3],
    "64x64-splits": replace(ALL_BUILDS[3], splits=4),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("m, n, k", SHAPES, ids=str)
def test_simulated_product(simulated, m, n, k, build, pair):
    a, b = operands(m, n, k, pair)
    out = gluon.matmul(a, b, torch.float32, None, build=BUILDS[build])
    assert relative_error(out, a, b) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [128, 131])
def test_simulated_product_with_bias(simulated, n, dtype, build):
    a, b = operands(100, n, 300, "square")
    bias = torch.randn(n)
    a = a._replace(scale=a.scale / 100)
    out = gluon.matmul(a, b, dtype, bias, build=BUILDS[build])
    wanted = ops.matmul(a, b, out_dtype=torch.float32, bias=bias, backend="reference")
    torch.testing.assert_close(
        out.float(), wanted, rtol=TOLERANCE[dtype], atol=2e-3 if dtype != torch.float32 else 1e-4
    )
    assert out.dtype is dtype


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("build", BUILDS)
def test_simulated_product_adds_to_a_gradient(simulated, build, pair):
    a, b = operands(130, 144, 400, pair)
    start = 100 * torch.randn(130, 144)
    out = start.clone()
    gluon.add_matmul(out, a, b, build=BUILDS[build])
    assert relative_error(out, a, b, start) < TOLERANCE[torch.float32]


@functools.cache
def in_one_order():
    """(arguments of a product, the product in one order of the partitions)."""
    arguments = (*operands(300, 272, 900, "one-row"), torch.bfloat16, None)
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        return arguments, gluon.matmul(*arguments, build=BUILDS["256x128"])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_order_of_the_partitions_gives_the_same_bits(simulated, programs, seed):
    arguments, wanted = in_one_order()
    simulated.programs, simulated.seed = programs, 1000 * (seed + 1)
    for build in ("256x128", "256x128-pair"):
        assert torch.equal(gluon.matmul(*arguments, build=BUILDS[build]), wanted)


def test_nan_and_inf_stay_in_their_row_and_column(simulated):
    x, w = torch.randn(130, 300), torch.randn(140, 300)
    x[5, 7], x[129, 299], w[139, 1] = float("nan"), float("inf"), float("nan")
    a, b = (ops.quantize(t, FP8_1X128, backend="reference").rowwise for t in (x, w))
    out = gluon.matmul(a, b, torch.float32, None, build=BUILDS["256x128"])
    bad = torch.zeros(130, 140, dtype=torch.bool)
    bad[[5, 129]], bad[:, 139] = True, True
    assert torch.equal(~out.isfinite(), bad)


@pytest.mark.parametrize("build", BUILDS)
def test_shared_memory_suffices(simulated, build):
    a, b = operands(64, 128, 128, "one-row")
    for dtype in (torch.bfloat16, torch.float32):
        gluon.matmul(a, b, dtype, None, build=BUILDS[build])
    # 227 KiB, less what barriers and the compiler take.
    assert max(simulated.shared) <= 226 * 1024


FAULTS = {
    "a stage is freed before it is read": (
        "            second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])\n"
        "            free_stage_after(a_scale, 2, stage, zero, B.ctas)\n",
        "            free_stage_after(a_scale, 2, stage, zero, B.ctas)\n"
        "            second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])\n",
    ),
    # Seen on an H200: rows scaled by what a later block brought.
    "a stage is freed before its scales have come": (
        "            free_stage_after(a_scale, 2, stage, zero, B.ctas)\n            # Here",
        "            free_stage(stage, B.ctas)\n            # Here",
    ),
    "the producer does not wait": (
        "            wait_for_stage(stage, phase, B.ctas)\n            bar",
        "            bar",
    ),
    "a consumer does not wait for a tile": ("    mbarrier.wait(full.index(stage), phase, pred=first < last)\n", ""),
    "a consumer does not wait for a block": (
        "mbarrier.wait(full.index(following), its_phase, pred=k + 1 < last)\n            second, b_factor",
        "second, b_factor",
    ),
    "a consumer waits for a block too many": (
        "its_phase, pred=k + 1 < last)\n            second, b_factor",
        "its_phase)\n            second, b_factor",
    ),
    "a barrier expects too few bytes": ("expect(bar, B.copied_bytes)", "expect(bar, B.copied_bytes - 512)"),
    "a barrier expects too many bytes": ("expect(bar, B.copied_bytes)", "expect(bar, B.copied_bytes + 512)"),
    "a barrier counts one consumer": (
        "make_barriers(B.stages, _WARPS * B.consumers * B.ctas)",
        "make_barriers(B.stages, _WARPS * B.ctas)",
    ),
    "the phase never turns": ("stage, phase = following, its_phase", "stage = following"),
    "output is staged before the last copy left": (
        "tma.store_wait(B.waves - 1)\n",
        "tma.store_wait(B.waves)\n",
    ),
    "the program ends before its copies": ("    if B.copy_out:\n        tma.store_wait(0)\n", ""),
    "a copy for both waits for one": ("_WARPS * B.consumers * B.ctas)", "_WARPS * B.consumers)"),
    "one of a pair leaves before the other": ("        for _ in range(B.stages):\n", "        for _ in range(0):\n"),
    "rows beside the tensor are written": ("mask = own[:, None] & (columns < N)[None, :]", "mask = None"),
}


SEEDS = range(5)


def differs(monkeypatch, kernel, seed: int) -> bool:
    """Whether `kernel` gives another product in the order of the partitions that `seed` draws."""
    launcher = simulate(monkeypatch, kernel)
    # Several tiles for each.
    launcher.programs, launcher.seed = 1, seed
    a, b = operands(500, 257, 2000, "one-row")
    wanted = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    for b_rows in (256, 257):
        cut = b._replace(qdata=b.qdata[:b_rows], scale=b.scale[:, :b_rows])
        out = gluon.matmul(a, cut, torch.bfloat16, None, build=ALL_BUILDS[0])
        if not torch.allclose(out.float(), wanted[:, :b_rows], rtol=2**-8, atol=1e-3 * wanted.abs().max().item()):
            return True
    return False


@functools.cache
def check_control() -> None:
    """The kernel without a fault passes in every order that those with one are tried in."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        kernel = simulator.without_fault(pipeline, Path(folder)).matmul_fp8_kernel
        assert not any(differs(patch, kernel, seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_sees(monkeypatch, tmp_path, fault):
    """The kernel with one fault: in some order of the partitions it must fail or give another product."""
    check_control()
    kernel = simulator.with_fault(pipeline, *FAULTS[fault], tmp_path).matmul_fp8_kernel
    with contextlib.suppress(simulator.SimulationError):
        assert any(differs(monkeypatch, kernel, seed) for seed in SEEDS)


def test_choice_of_build():
    """Large products take large tiles, pairs where Triton has them; few rows take small tiles, and split a long K."""
    large = choose_build(4096, 18432, 7168, 128, 132, 2)
    assert (large.tile_m, large.ctas, large.splits) == (256, 2, 1)
    few = choose_build(64, 2048, 7168, 128, 132, 1)
    assert few.tile_m == 64 and few.splits > 1
    for m, n, k in ((1, 1, 1), (64, 64, 128), (100_000, 8, 40), (8, 100_000, 128)):
        build = choose_build(m, n, k, 128, 132, 1)
        assert build.splits * 128 <= max(k, 128)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


GPU_BUILDS = [name for name, build in BUILDS.items() if build.ctas <= gluon.MAX_CTAS]
GPU_SHAPES = [*SHAPES, (4097, 576, 2048), (64, 4096, 7168), (2048, 1408, 4097), (300, 10944, 512)]


def gpu_operands(m: int, n: int, k: int, pair: str):
    return (x._replace(qdata=x.qdata.cuda(), scale=x.scale.cuda()) for x in operands(m, n, k, pair))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("build", GPU_BUILDS)
@pytest.mark.parametrize("m, n, k", GPU_SHAPES, ids=str)
def test_product_on_the_gpu(hopper, m, n, k, build, pair):
    """Against the reference, within what wgmma's 14 bits a block leave: 2^-13 of the magnitudes a step of K = 32."""
    a, b = gpu_operands(m, n, k, pair)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = gluon.matmul(a, b, out_dtype, None, build=BUILDS[build])
        assert relative_error(out, a, b) < 4 * 2**-13 + TOLERANCE[out_dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("m, n, k", GPU_SHAPES, ids=str)
def test_backend_by_name_on_the_gpu(hopper, m, n, k, pair):
    a, b = gpu_operands(m, n, k, pair)
    bias = torch.randn(n, device="cuda")
    options = {"out_dtype": torch.bfloat16, "bias": bias, "backend": "gluon"}
    out = ops.matmul(a, b, **options)
    assert torch.equal(out, ops.matmul(a, b, **options))
    assert relative_error(out, a, b, bias) < 4 * 2**-13 + TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("build", GPU_BUILDS)
def test_adding_to_a_gradient_on_the_gpu(hopper, build, pair):
    a, b = gpu_operands(260, 272, 4097, pair)
    start = 100 * torch.randn(260, 272, device="cuda")
    out = start.clone()
    gluon.add_matmul(out, a, b, build=BUILDS[build])
    assert relative_error(out, a, b, start) < 4 * 2**-13 + TOLERANCE[torch.float32]
