"""Grouped NVFP4 products that are decoded to bf16 first: the Hopper kernel, simulated on any machine."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import gluon_simulator as simulator
import pytest
import torch
from grouped_gluon import BUILDS, every_build, gluon, pipeline, simulate
from grouped_products import ROUTINGS, Case, assert_close_to_each_group

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops.groups.ends import as_groups, clamped_ends
from torchao_blockwise.testing import random_tensor

sums = pytest.importorskip("torchao_blockwise.ops.gemm.gluon_decoded")
PAIRS = {"m": (NVFP4_1X16, NVFP4_16X16), "k": (NVFP4_1X16, NVFP4_1X16)}
every_direction = pytest.mark.parametrize("along", PAIRS)
# Tiles of 256 tokens and more, groups that end everywhere in a stage of 64, some in one.
ROUTINGS = {
    **{name: routing for name, routing in ROUTINGS.items() if name != "no_tokens"},
    "long_and_short": ([5, 400, 60, 140], 0),
    "blocks_of_a_stage": ([64, 16, 32, 48, 80, 1], 0),
}
# Each routing by the largest tile and the least, the other builds by those that end everywhere.
_OTHERS = ("empty_first_middle_and_last", "ragged_and_a_tail", "long_and_short", "blocks_of_a_stage")
every_routing_and_build = pytest.mark.parametrize(
    ("routing", "build"),
    [(r, b) for b in BUILDS for r in ROUTINGS if r in _OTHERS or b in ("256x128", "64x64")],
)


@pytest.fixture
def simulated(monkeypatch):
    return simulate(monkeypatch, pipeline.grouped_matmul_bf16_kernel)


@functools.cache
def case(along: str, routing: str, n: int = 136, k: int = 200) -> Case:
    return Case(along, PAIRS[along], ROUTINGS[routing], "cpu", n, k)


def product(case: Case, dtype=torch.float32, build: str = "256x128", ends=None) -> torch.Tensor:
    ends = case.ends if ends is None else ends
    return gluon.grouped_matmul(case.a, case.b, as_groups(ends), case.along, dtype, BUILDS[build])


def is_right(out: torch.Tensor, case: Case) -> bool:
    try:
        assert_close_to_each_group(case, out, "gluon")
    except AssertionError:
        return False
    return True


# --- products ---------------------------------------------------------------------------------------------------------


@every_direction
@every_routing_and_build
def test_simulated_product(simulated, build, routing, along):
    of = case(along, routing)
    out = product(of, build=build)
    assert out.shape == ((of.tokens, of.n) if along == "m" else (len(of.sizes), of.n, of.k))
    assert_close_to_each_group(of, out, "gluon")


@every_direction
@pytest.mark.parametrize(("n", "k"), [(1, 2), (40, 34), (131, 257), (136, 264), (192, 1008)], ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_simulated_features_and_roundings(simulated, dtype, n, k, along):
    """Experts that begin within a block of 16 rows; rows off 16 bytes; outputs that are copied out and stored."""
    of = case(along, "ragged_and_a_tail", n, k)
    for build in ("256x128", "64x64"):
        out = product(of, dtype, build)
        assert out.dtype is dtype
        assert_close_to_each_group(of, out, "gluon")


@every_routing_and_build
def test_simulated_product_adds_to_gradients(simulated, routing, build):
    of = case("k", routing)
    start = torch.randn(len(of.sizes), of.n, of.k)
    empty = [g for g, size in enumerate(of.sizes) if not size]
    full = [g for g, size in enumerate(of.sizes) if size]
    start[empty, 0, :2] = torch.tensor([-0.0, float("nan")])
    out = start.clone()
    gluon.add_grouped_matmul(out, of.a, of.b, as_groups(of.ends), BUILDS[build])
    assert torch.equal(out[empty].view(torch.int32), start[empty].view(torch.int32))
    torch.testing.assert_close(out[full], start[full] + product(of)[full], rtol=2.0**-20, atol=1e-6)


def test_simulated_products_of_a_training_step(simulated):
    """output, grad_input and grad_weight of experts, with the copies that a layer makes."""
    experts, n, k, sizes = 3, 72, 112, [70, 0, 33]
    ends, tokens = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + 6
    x, dy, w = random_tensor(tokens, k, seed=1), random_tensor(tokens, n, seed=2), random_tensor(experts, n, k, seed=3)
    options = {"columnwise": True, "backend": "reference"}
    weights = ops.quantize(w, NVFP4_16X16, **options)
    qx, qdy = (ops.quantize(t, NVFP4_1X16, groups=ends, **options) for t in (x, dy))
    products = (
        ("m", qx.rowwise, weights.rowwise),
        ("m", qdy.rowwise, weights.columnwise),
        ("k", qdy.columnwise, qx.columnwise),
    )
    for along, a, b in products:
        wanted = ops.grouped_matmul(a, b, ends, along=along, out_dtype=torch.float32, backend="reference")
        out = gluon.grouped_matmul(a, b, as_groups(ends), along, torch.float32, BUILDS["128x128"])
        assert out.shape == wanted.shape
        torch.testing.assert_close(out, wanted, rtol=2.0**-16, atol=2.0**-16 * wanted.abs().max().item())


@functools.cache
def in_one_order(along: str) -> tuple[Case, torch.Tensor]:
    """A product, and its result in one order of the partitions."""
    of = case(along, "long_and_short", 200, 140)
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, pipeline.grouped_matmul_bf16_kernel)
        return of, product(of, torch.bfloat16)


@every_direction
@pytest.mark.parametrize(("programs", "seed"), ((1, 0), (2, 1), (5, 2), (5, 3)))
def test_any_order_of_the_partitions_gives_the_same_bits(simulated, programs, seed, along):
    of, wanted = in_one_order(along)
    simulated.programs, simulated.seed = programs, 1000 * (seed + 1)
    for build in ("256x128", "256x128-pair"):
        assert torch.equal(product(of, torch.bfloat16, build), wanted)


@every_direction
@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends_reach_no_other_memory(simulated, ends, along):
    malformed, tokens = torch.tensor(ends, dtype=torch.int32), 300
    meant = clamped_ends(malformed, tokens)
    sizes = meant.diff(prepend=meant.new_zeros(1)).tolist()
    of = Case(along, PAIRS[along], (sizes, tokens - sum(sizes)), "cpu")
    out = product(of, build="64x64", ends=malformed)
    assert torch.equal(out, product(of, build="64x64"))
    assert_close_to_each_group(of, out, "gluon")


@every_direction
def test_scales_of_nan_reach_no_other_group(simulated, along):
    """A tensor scale is every group's, and none of what no group has; block scales are of their blocks."""
    sizes = [16, 0, 30, 16]
    of = Case(along, PAIRS[along], (sizes, 5), "cpu")
    right, whole, scale = product(of), of.a, of.a.scale.clone()
    (scale[16:46] if along == "m" else scale[:, 1:3]).view(torch.uint8).fill_(0x7F)
    of.a = whole._replace(scale=scale)
    out = product(of)
    hit = slice(16, 46) if along == "m" else slice(2, 3)
    assert out[hit].isnan().all()
    rest = torch.ones(len(out), dtype=torch.bool)
    rest[hit] = False
    assert torch.equal(out[rest], right[rest])
    of.a = whole._replace(global_scale=torch.full_like(whole.global_scale, float("nan")))
    out = product(of)
    of_none = slice(sum(sizes), None) if along == "m" else slice(1, 2)
    assert not out[of_none].view(torch.int32).any()
    assert out[:16].isnan().all() if along == "m" else out[[0, 2, 3]].isnan().all()


@every_build
@every_direction
def test_shared_memory_suffices(simulated, along, build):
    for dtype in (torch.bfloat16, torch.float32):
        product(case(along, "multiples_of_every_block", 128, 128), dtype, build)
    assert max(simulated.shared) <= 226 * 1024


FAULTS = {
    "a group's last stage is multiplied whole": ('if B.along == "k":\n        end', "if False:\n        end"),
    "a group's last blocks are left out": ("if end + i < last:", "if False:"),
    "a block of the next group is multiplied": ("if end + i < last:", "if end + i < last + 1:"),
    "a stage is freed while it is multiplied": ("0, B.depth, LIVE, a_ring", "0, B.depth, 2 * LIVE, a_ring"),
    "the stage after is freed": (
        "if k > first:\n                free_stage(previous_stage(stage, B.stages)",
        "if k > first:\n                free_stage(stage",
    ),
    "the last stage is not freed": ("        if first < end:\n", "        if last < 0:\n"),
    "a stage is freed by who has read none": (
        "        if first < end:\n            free_stage(previous_stage(stage, B.stages)",
        "        if True:\n            free_stage(stage",
    ),
    "the last products are not waited for": ("warpgroup_mma_wait(0, deps=[acc0, acc1])", "(acc0, acc1)"),
    "a consumer without work frees nothing": (
        "        if LIVE == 0:\n            free_stage(stage, B.ctas)\n",
        "        if LIVE == 0:\n            pass\n",
    ),
    "the second wave is the first": ("WAVE + B.stride, B)", "WAVE, B)"),
    "tensor scales are left out": ("acc0 * scale", "acc0"),
    "what is empty is scaled": ("gl.where(first < last, scale, 0.0)", "scale"),
    "a stage is read before it is full": (
        "        mbarrier.wait(full.index(stage), phase)\n        if LIVE == 0:",
        "        if LIVE == 0:",
    ),
}  # fmt: skip


@functools.cache
def tried(along: str) -> tuple[Case, Case]:
    """What a fault is looked for in: groups that end everywhere, and one that has nothing, with a scale of NaN."""
    empty = Case(along, PAIRS[along], ([0], 40), "cpu", 40, 72)
    empty.a = empty.a._replace(global_scale=torch.full((), float("nan")))
    return Case(along, PAIRS[along], ([70, 0, 130, 16, 96], 40), "cpu", 200, 520), empty


def differs(monkeypatch, copied) -> bool:
    """Whether the kernel gives a wrong product in some order, with `copied` in the place of the module."""
    monkeypatch.setattr(pipeline, "accumulate_decoded", copied.accumulate_decoded)
    launcher = simulate(monkeypatch, pipeline.grouped_matmul_bf16_kernel)
    # Few programs, so that the ring goes round often.
    launcher.programs = 2
    for of, empty in map(tried, PAIRS):
        for launcher.seed in range(4):
            if not is_right(product(of, torch.bfloat16), of) or product(empty).isnan().any():
                return True
    return False


@functools.cache
def check_control() -> None:
    """The kernel without a fault passes in every order that those with one are tried in."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        assert not differs(patch, simulator.without_fault(sums, Path(folder)))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_sees(monkeypatch, tmp_path, fault):
    """The kernel with one fault: it must fail or give another product."""
    check_control()
    faulty = simulator.with_fault(sums, *FAULTS[fault], tmp_path)
    with contextlib.suppress(simulator.SimulationError):
        assert differs(monkeypatch, faulty)
