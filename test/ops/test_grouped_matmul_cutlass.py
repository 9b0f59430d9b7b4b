"""Grouped NVFP4 GEMMs through PyTorch's kernels for Blackwell: what they are handed."""

from __future__ import annotations

import pytest
import scaled_products
import torch
from grouped_products import PAIRS, ROUTINGS, Case, assert_close_to_each_group
from product_budgets import pair_id

from torchao_blockwise.formats import NVFP4_1X16
from torchao_blockwise.ops.gemm import cutlass
from torchao_blockwise.ops.groups.ends import as_groups

tail = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_blackwell")
NVFP4_PAIRS = [pair for pair in PAIRS["m"] if pair[0] is NVFP4_1X16]
N, K = 144, 224


@pytest.fixture
def kernels(monkeypatch):
    """PyTorch's are those of the stand-in."""

    def product(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, offs, output_dtype):
        assert (recipe_a, swizzle_a) == (recipe_b, swizzle_b)
        how = [[kind.value for kind in kinds] for kinds in (recipe_a, swizzle_a)]
        return scaled_products.scaled_grouped_mm(a, b, scale_a, scale_b, *how, offs, output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", product)


def product(case: Case, ends=None, **changes) -> torch.Tensor:
    ends = case.ends if ends is None else ends
    return cutlass.grouped_matmul(case.a._replace(**changes), case.b, as_groups(ends), "m", torch.bfloat16)


@pytest.mark.parametrize("routing", [routing for routing in ROUTINGS if routing != "no_tokens"])
@pytest.mark.parametrize("pair", NVFP4_PAIRS, ids=pair_id)
def test_operands_are_handed_over_as_documented(kernels, pair, routing):
    case = Case("m", pair, ROUTINGS[routing], "cpu", N, K)
    # Scales that differ from row to row, a number from 2 on: another row's would show.
    rows = torch.arange(case.tokens, dtype=torch.uint8) % 7
    case.a.scale.view(torch.uint8).clamp_(min=0x46).sub_(rows[:, None])
    assert_close_to_each_group(case, product(case), "reference")


def test_wild_ends_and_payload_that_lies_anywhere(kernels, machine):
    machine.reads_no_group_ends()
    case = Case("m", NVFP4_PAIRS[0], ([0, 40, 0, 60], 20), "cpu", N, K)
    wide = torch.zeros(120, K // 2 + 5, dtype=torch.uint8)
    wide[:, 3 : K // 2 + 3] = case.a.qdata
    ends = torch.tensor([-5, 40, 30, 100], dtype=torch.int32)
    assert torch.equal(product(case, ends, qdata=wide[:, 3 : K // 2 + 3]), product(case))


def test_each_expert_may_have_its_tensor_scale(kernels):
    case = Case("m", NVFP4_PAIRS[0], ([50, 0, 30], 4), "cpu", N, K)
    factors = torch.tensor([1.0, 8.0, 0.5])
    scaled = product(case, global_scale=case.a.global_scale * factors)
    expected = product(case)
    expected[50:80] *= 0.5
    assert torch.equal(scaled, expected)


@pytest.mark.parametrize("ends", ([0], [1], [33], [70], [20, 40]), ids=str)
def test_rows_of_no_group_become_zeros(ends):
    out = torch.full((70, 600), torch.nan)
    tail.zero_tail_(out, torch.tensor(ends, dtype=torch.int32))
    assert out[: ends[-1]].isnan().all() and (out[ends[-1] :] == 0).all()


# --- PyTorch's builds -------------------------------------------------------------------------------------------------


def test_a_build_is_asked_for_no_rows(monkeypatch, request):
    """This build's CPU has no such kernels: it says so itself."""
    cutlass._why_not_built.cache_clear()
    request.addfinalizer(cutlass._why_not_built.cache_clear)
    reason = cutlass._why_not_built(torch.device("cpu"))
    assert reason is not None and reason.startswith(f"PyTorch {torch.__version__} has none: ")
    cutlass._why_not_built.cache_clear()
    request.getfixturevalue("kernels")
    assert cutlass._why_not_built(torch.device("cpu")) is None
