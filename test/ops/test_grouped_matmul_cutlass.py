"""Grouped NVFP4 products through PyTorch's kernels for Blackwell: what they are handed, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import scaled_products
import torch
from grouped_products import PAIRS, ROUTINGS, Case, assert_close_to_each_group
from product_budgets import pair_id

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
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


# --- what it admits ---------------------------------------------------------------------------------------------------

NVFP4_PAIR = (NVFP4_1X16, NVFP4_16X16)


def why_not(machine, shapes=((64, 128), (8, 256, 128)), pair=NVFP4_PAIR, along="m", out_dtype=torch.bfloat16, **has):
    """`cutlass.why_not` of payloads of these shapes, in bytes, as if on such a GPU."""
    machine.has_gpu_of(has.get("capability", (10, 0)))
    machine.has_triton(has.get("triton", True))
    machine.patch.setattr(cutlass, "_why_not_built", lambda device: has.get("kernels"))
    payloads = (
        SimpleNamespace(shape=torch.Size(shape), device=torch.device(has.get("device", "cuda:0"))) for shape in shapes
    )
    a, b = (Operand(payload, None, None, fmt.name) for payload, fmt in zip(payloads, pair))
    return cutlass.why_not(a, b, None, along, out_dtype)


ADMITTED = {
    "experts": {},
    "sm_103": {"capability": (10, 3)},
    "any M": {"shapes": ((7, 16), (1, 16, 16))},
    "one-row blocks in b": {"pair": (NVFP4_1X16, NVFP4_1X16)},
}
REFUSED = {
    "the kernels are for Blackwell GPUs (sm_100), got cpu": {"device": "cpu"},
    "the kernels are for Blackwell GPUs (sm_100), got sm_90": {"capability": (9, 0)},
    "the kernels are for Blackwell GPUs (sm_100), got sm_120": {"capability": (12, 0)},
    "the kernels support only e2m1 elements, got fp8_1x128 · fp8_128x128": {"pair": (FP8_1X128, FP8_128X128)},
    'the kernels support only along "m", got along "k"': {"along": "k", "shapes": ((64, 128), (256, 128))},
    "out_dtype must be bfloat16, got torch.float32": {"out_dtype": torch.float32},
    "the kernels do not support empty GEMMs, got M=0, N=16, K=16": {"shapes": ((0, 16), (2, 16, 16))},
    "N and the bytes of packed K must be multiples of 16, got N=24, K=16": {"shapes": ((4, 16), (2, 24, 16))},
    "N and the bytes of packed K must be multiples of 16, got N=32, K=8": {"shapes": ((4, 8), (2, 32, 8))},
    "the kernels support at most 1024 groups, got 1025": {"shapes": ((4, 16), (1025, 16, 16))},
    "PyTorch has none": {"kernels": "PyTorch has none"},
    "triton is not installed (pip install triton)": {"triton": False},
}


@pytest.mark.parametrize(
    ("reason", "case"), [*((None, case) for case in ADMITTED.values()), *REFUSED.items()], ids=[*ADMITTED, *REFUSED]
)
def test_what_it_admits_and_why_not_the_rest(reason, case, machine):
    assert why_not(machine, **case) == reason


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
