"""The Hopper kernel of plain and grouped GEMMs, as it is on the GPU."""

from __future__ import annotations

import pytest
import torch
from gluon_gemm import (
    ADDING,
    BUILDS,
    GROUPED_BUILDS,
    KINDS,
    ROUTINGS,
    SHAPES,
    add_product,
    case,
    grouped_kinds,
    product,
)
from gpu_steps import capture
from grouped_products import Case, assert_close_to_each_group
from product_budgets import accumulation_unit, assert_within_budget

from torchao_blockwise import ops
from torchao_blockwise.ops.groups.ends import clamped_ends

pytestmark = pytest.mark.gpu

GPU_ROUTINGS = {
    **ROUTINGS,
    "mixed": ((1000, 0, 3, 517, 2048, 128, 64, 1), 300),
    "90_experts": ((1, 0, 130) * 30, 5),
}
GPU_SHAPES = [*SHAPES, (4097, 576, 2048), (64, 4096, 7168), (2048, 1408, 4097), (300, 10944, 512)]
routings = pytest.mark.parametrize("routing", GPU_ROUTINGS)


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def on_gpu(kind: str, routing: str | tuple, n: int, k: int):
    """Operands, after memory was filled with NaN: what the kernel leaves out shows as what was there before."""
    sizes, tail = GPU_ROUTINGS.get(routing, routing)
    of = case(kind, (tuple(sizes), tail), n, k, "cuda")
    torch.full((len(of.sizes) * n * k + of.tokens * n,), float("nan"), device="cuda")
    return of


def assert_right(of, out) -> None:
    assert_close_to_each_group(of, out, "gluon")
    if of.along == "m":
        assert not out[of.ends[-1] :].float().view(torch.int32).any()


@pytest.mark.parametrize("kind", ("square", "one_row"))
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("m", "n", "k"), GPU_SHAPES, ids=str)
def test_plain_product(m, n, k, build, kind):
    of = on_gpu(kind, ((m,), 0), n, k)
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(of, product(of, dtype, build))


@pytest.mark.parametrize("kind", ("square", "one_row"))
@pytest.mark.parametrize(("m", "n", "k"), GPU_SHAPES, ids=str)
def test_backend_by_name(m, n, k, kind):
    of, bias = on_gpu(kind, ((m,), 0), n, k), torch.randn(n, device="cuda")
    options = {"out_dtype": torch.bfloat16, "bias": bias, "backend": "gluon"}
    out = ops.matmul(of.a, of.b, **options)
    assert torch.equal(out, ops.matmul(of.a, of.b, **options))
    assert_within_budget(out, of.a, of.b, k, accumulation_unit("gluon", of.a.format, "cuda"), bias)


@routings
@grouped_kinds
@pytest.mark.parametrize("build", GROUPED_BUILDS)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (131, 257), (576, 1104)], ids=str)
def test_grouped_product(routing, n, k, build, kind):
    of = on_gpu(kind, routing, n, k)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_right(of, product(of, dtype, build))


@routings
def test_grouped_backend_by_name_repeats_its_bits(routing):
    of = on_gpu("m", routing, 576, 1100)
    out, again = (of.run(backend="gluon") for _ in range(2))
    assert torch.equal(out, again)
    assert_right(of, out)


@pytest.mark.parametrize(("kind", "build"), [(kind, b) for kind in ADDING for b in GROUPED_BUILDS])
@pytest.mark.parametrize("routing", GPU_ROUTINGS)
def test_adding_to_a_gradient(routing, build, kind):
    of = on_gpu(kind, routing, 264, 272)
    right = product(of, build=build)
    start = 100 * torch.randn_like(right)
    out = start.clone()
    add_product(out, of, build)
    full = [g for g, size in enumerate(of.sizes) if size] if of.along else slice(None)
    empty = [g for g, size in enumerate(of.sizes) if not size] if of.along else []
    assert torch.equal(out[empty], start[empty])
    # Where the sum is small, by rounding of what it is the sum of: a unit in the last place of `start`.
    rounding = 2.0**-23 * start.abs().max().item()
    torch.testing.assert_close(out[full], start[full] + right[full], rtol=2.0**-20, atol=rounding)


@grouped_kinds
@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends(ends, kind):
    """Run this one under compute-sanitizer too."""
    malformed = torch.tensor(ends, dtype=torch.int32)
    sizes = clamped_ends(malformed, 300).diff(prepend=malformed.new_zeros(1)).tolist()
    of = on_gpu(kind, (tuple(sizes), 300 - sum(sizes)), 130, 257)
    assert_right(of, product(of, build=None, ends=malformed.cuda()))


def test_a_captured_product_follows_the_ends():
    """Another routing in the same memory: a replay reads the ends again, without a host sync."""
    # Without NaN in the rows of no group, for they come into one.
    of = Case("m", KINDS["m"][1], ((33, 0, 129), 100), "cuda", 136, 256)
    graph, out = capture(lambda: product(of, build=None))
    of.ends.copy_(torch.tensor([100, 120, 121]))
    of.sizes = [100, 20, 1]
    graph.replay()
    assert_right(of, out)
