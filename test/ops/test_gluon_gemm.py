"""The Hopper kernel of plain and grouped GEMMs, simulated on any machine and as it is; the choice of its build."""

from typing import NamedTuple

import pytest
import torch
from gluon_gemm import (
    ADDING,
    BUILDS,
    GROUPED,
    GROUPED_BUILDS,
    KINDS,
    ROUTINGS,
    SHAPES,
    add_product,
    case,
    grouped_kinds,
    kinds,
    product,
    simulate,
    tables,
)
from grouped_products import Case, assert_adds, assert_close_to_each_group, assert_nan_stays_in_its_group
from product_budgets import accumulation_unit, assert_within_budget

from torchao_blockwise import ops
from torchao_blockwise.ops.gemm.builds import choose_build
from torchao_blockwise.ops.groups.ends import clamped_ends


@pytest.fixture
def simulated(monkeypatch):
    launcher = simulate(monkeypatch)
    yield launcher
    # 227 KiB, less what barriers and the compiler take.
    assert max(launcher.shared, default=0) <= 226 * 1024


def builds_of(kind: str) -> tuple[str, ...]:
    return GROUPED_BUILDS if KINDS[kind][0] else tuple(BUILDS)


RAGGED = ("empty_first_middle_and_last", "ragged_and_a_tail", "blocks_of_a_stage")


def products():
    """(kind, routing, n, k, build): by default of groups those that end everywhere, of plain GEMMs the ragged ones."""
    for kind in ("square", "one_row"):
        for m, n, k in SHAPES:
            for build in BUILDS:
                marks = () if (m, n, k) in (SHAPES[0], SHAPES[2]) or (m == 513 and build == "256x128") else "slow"
                yield kind, ((m,), 0), n, k, build, marks
    for kind in GROUPED:
        for routing in ROUTINGS:
            for build in GROUPED_BUILDS:
                by_default = routing in RAGGED if build == "64x64" else (routing == "long_and_short")
                # Rows of 16 bits that fill 16 bytes are copied out, others are stored.
                yield kind, routing, 131 if build == "128x128" else 136, 200, build, () if by_default else "slow"

    # Gradients of whole tiles, which are copied out.
    for kind in ("k", "decoded_k"):
        yield kind, "ragged_and_a_tail", 192, 264, "64x64", ()
    # With a tensor scale for each group.
    for kind in ("decoded_m", "decoded_k"):
        yield kind, ((30, 0, 40), 5, (True, True)), 136, 200, "256x128", ()


def every_case(rows):
    """As one argument: the default tier takes the rows that are not marked, and does not choose others."""
    made = [
        pytest.param(row, id="-".join(map(str, row)), marks=getattr(pytest.mark, marks) if marks else ())
        for *row, marks in rows
    ]
    return pytest.mark.parametrize("row", made)


@every_case(products())
def test_product(simulated, row):
    *which, build = row
    of = case(*which)
    for dtype in (torch.float32, torch.float16 if build == "64x64" else torch.bfloat16):
        out = product(of, dtype, build)
        assert out.dtype is dtype
        assert_close_to_each_group(of, out, "gluon")
        if of.along == "m":
            # Bits, so that -0 is seen.
            assert not out[of.ends[-1] :].view(torch.uint8).any()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_bias(simulated, dtype, build):
    for n in (128, 131):
        of, bias = case("square", ((100,), 0), n, 300), torch.linspace(-9, 9, n)
        out = product(of, dtype, build, bias=bias)
        assert out.dtype is dtype
        assert_within_budget(out, of.a, of.b, 300, accumulation_unit("gluon", of.a.format, "cpu"), bias)


def sums():
    for kind in ADDING:
        for build in builds_of(kind):
            yield kind, RAGGED[0], build, ()
        for routing in ROUTINGS:
            yield from ((kind, routing, build, "slow") for build in GROUPED_BUILDS if routing != RAGGED[0])


@every_case(sums())
def test_adding_to_a_gradient(simulated, row):
    *which, build = row
    of = case(*which)
    assert_adds(of, lambda out: add_product(out, of, build), product(of, build=build), 100)


@grouped_kinds
@pytest.mark.parametrize("routing", ("ragged_and_a_tail", "long_and_short"))
def test_tables_made_before(simulated, monkeypatch, routing, kind):
    """One object for all heights of tiles and both directions, of the tokens without padding."""
    of = case(kind, routing)
    made = ops.make_groups(of.ends, of.tokens, of.a.format, backend="reference")
    wanted = [product(of, build=build) for build in GROUPED_BUILDS]
    monkeypatch.setattr(tables, "launch", None)
    for build, right in zip(GROUPED_BUILDS, wanted):
        assert torch.equal(product(of, build=build, ends=made), right)
        if of.along == "k":
            assert_adds(of, lambda out, build=build: add_product(out, of, build, made), right)


class Trial(NamedTuple):
    """GEMMs and a build for which every fault of synchronization that was tried shows in one of these orders."""

    kinds: tuple[str, ...] = ("m", "k")
    build: str = "256x128"
    # Few, so that the ring goes round often.
    programs: int = 2
    routing: str | tuple = ((33, 0, 129), 100)
    sizes: tuple[tuple[int, int], ...] = ((200, 520),)  # n, k
    seeds: int = 6


TRIALS = {
    # More blocks than stages, several tiles a program, with and without copies of the output.
    "plain": Trial(("one_row",), programs=1, routing=((500,), 0), sizes=((256, 2000), (257, 2000)), seeds=5),
    "square": Trial(("square",), programs=2, routing=((300,), 0), sizes=((200, 600),), seeds=4),
    "square_k": Trial(("square_k",), seeds=4),
    "grouped": Trial(),
    "decoded": Trial(("decoded_m", "decoded_k"), routing=((70, 0, 130, 16, 96), 40), seeds=4),
    "one wave": Trial(build="128x128"),
    "whole": Trial(routing="whole"),
}


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_any_order_of_the_partitions_is_right(simulated, trial):
    simulated.programs = trial.programs
    for of in (case(kind, trial.routing, n, k) for kind in trial.kinds for n, k in trial.sizes):
        for simulated.seed in range(trial.seeds):
            assert_close_to_each_group(of, product(of, torch.bfloat16, trial.build), "gluon")


@kinds
def test_nan_stays_in_its_group(simulated, kind):
    assert_nan_stays_in_its_group(*KINDS[kind], "cpu", product)


def tile(*sizes: int, **groups) -> int:
    return choose_build(*sizes, 128, 132, **groups).tile_m


def test_choice_of_build():
    """Large products take large tiles; few rows take small tiles, and split a long K."""
    assert choose_build(4096, 18432, 7168, 128, 132) == BUILDS["256x128"]
    few = choose_build(64, 2048, 7168, 128, 132)
    assert few.tile_m == 64 and few.splits > 1
    for m, n, k in ((1, 1, 1), (64, 64, 128), (100_000, 8, 40), (8, 100_000, 128)):
        assert choose_build(m, n, k, 128, 132).splits * 128 <= max(k, 128)
    # Of groups: high tiles where they are long, low ones where most of a high tile would be empty; no splits.
    assert tile(32768, 2048, 7168, along="m", groups=32) == 256
    assert tile(2048, 7168, 1024, along="k", groups=32) == 256
    assert tile(4096, 2048, 7168, along="m", groups=256) == 128
    assert choose_build(1, 64, 1280, 128, 132, "m", 8) == BUILDS["64x64"]


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------

GPU_SHAPES = [*SHAPES, (4097, 576, 2048), (64, 4096, 7168), (2048, 1408, 4097), (300, 10944, 512)]
GPU_ROUTINGS = {
    **ROUTINGS,
    "mixed": ((1000, 0, 3, 517, 2048, 128, 64, 1), 300),
    "90_experts": ((1, 0, 130) * 30, 5),
}
GPU_CASES = {f"{kind}-{m}x{n}x{k}": (kind, ((m,), 0), n, k) for kind in ("square", "one_row") for m, n, k in GPU_SHAPES}
GPU_CASES |= {
    f"{kind}-{name}-{n}x{k}": (kind, routing, n, k)
    for kind in GROUPED
    for name, routing in GPU_ROUTINGS.items()
    for n, k in ((256, 512), (131, 257), (576, 1104))
}
gpu_cases = pytest.mark.parametrize(("kind", "routing", "n", "k"), GPU_CASES.values(), ids=GPU_CASES)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def on_gpu(kind: str, routing: tuple, n: int, k: int) -> Case:
    """Operands, after memory was filled with NaN: what the kernel leaves out shows as what was there before."""
    of = case(kind, (tuple(routing[0]), routing[1]), n, k, "cuda")
    torch.full((len(of.sizes) * n * k + of.tokens * n,), float("nan"), device="cuda")
    return of


def assert_right(of: Case, out: torch.Tensor) -> None:
    assert_close_to_each_group(of, out, "gluon")
    if of.along == "m":
        assert not out[of.ends[-1] :].float().view(torch.int32).any()


@pytest.mark.gpu
@gpu_cases
@pytest.mark.parametrize("build", BUILDS)
def test_product_and_sum_on_the_gpu(hopper, kind, routing, n, k, build):
    if build not in builds_of(kind):
        pytest.skip("groups take no splits")
    of = on_gpu(kind, routing, n, k)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        right = product(of, dtype, build)
        assert_right(of, right)
    if kind in ADDING:
        # Where the sum is small, by rounding of its terms, which are below 500.
        assert_adds(of, lambda out: add_product(out, of, build), right, 100, atol=500 * 2.0**-23)


@pytest.mark.gpu
@gpu_cases
def test_backend_by_name_repeats_its_bits(hopper, kind, routing, n, k):
    of, bias = on_gpu(kind, routing, n, k), torch.randn(n, device="cuda")
    out, again = (of.run(torch.bfloat16, backend="gluon") for _ in range(2))
    assert torch.equal(out, again)
    assert_right(of, out)
    if not of.along:
        out = of.run(torch.bfloat16, backend="gluon", bias=bias)
        assert_within_budget(out, of.a, of.b, k, accumulation_unit("gluon", of.a.format, "cuda"), bias)


@pytest.mark.gpu
@grouped_kinds
@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends_on_the_gpu(hopper, ends, kind):
    """The kernel reads tables of ends that are clamped. Run this one under compute-sanitizer too."""
    ends, tokens = torch.tensor(ends, dtype=torch.int32), 300
    sizes = clamped_ends(ends, tokens).diff(prepend=ends.new_zeros(1)).tolist()
    of = case(kind, (tuple(sizes), tokens - sum(sizes)), 130, 257, "cuda")
    assert_right(of, product(of, build=None, ends=ends.cuda()))
