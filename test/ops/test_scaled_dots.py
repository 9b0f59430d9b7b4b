"""NVFP4 GEMMs as FP4 tensor cores are given them: the interpreter takes `tl.dot_scaled` by its documented formula.

Packed elements and block scales reach the dot as they lie in memory, so what can be wrong is which of them: rows and
columns, first and second element of a byte, masks at ragged ends, scales of square blocks.
"""

from __future__ import annotations

import pytest
import torch
from grouped_products import PAIRS, ROUTINGS, Case, assert_close_to_each_group, case_id
from product_budgets import accumulation_unit, assert_within_budget, pair_id
from scaled_products import decoded

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16

interpreter = pytest.importorskip("triton.runtime.interpreter")
kernels = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_triton")

# (M, N, K): empty in each dim, one element, one block, ragged in each dim, odd K, several tiles.
PRODUCTS = (
    (0, 16, 32), (16, 0, 32), (16, 16, 0), (1, 1, 1), (1, 16, 128), (33, 47, 65), (63, 100, 500), (130, 129, 592),
)  # fmt: skip
KINDS = [(along, pair) for along, pairs in PAIRS.items() for pair in pairs if pair[0] is NVFP4_1X16]
CASES = [(*kind, ([m], 0), n, k) for kind in KINDS[:2] for m, n, k in PRODUCTS]
CASES += [(*kind, routing, 40, 200) for kind in KINDS[2:] for routing in ROUTINGS.values()]


@pytest.fixture(autouse=True)
def dots(monkeypatch) -> list:
    """The shapes of the dots that a launch takes."""
    if not ops.backend.interpreting():
        pytest.skip("the interpreter runs where there is no GPU")
    seen = []

    def create_dot_scaled(builder, a, a_scale, a_kind, b, b_scale, b_kind, fast, a_along_k, b_along_k, acc):
        assert a_along_k and b_along_k and a_scale.dtype.scalar.name == b_scale.dtype.scalar.name == "fp8e4nv"
        x, xs, y, ys, sums = (torch.tensor(t.data) for t in (a, a_scale, b, b_scale, acc))
        seen.append((len(x), len(ys), 2 * len(y)))
        xs, ys = (scale.view(torch.uint8).view(torch.float8_e4m3fn) for scale in (xs, ys))
        out = sums.double() + decoded(x, xs) @ decoded(y.mT, ys).mT
        return interpreter.TensorHandle(out.float().numpy(), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)
    monkeypatch.setattr(kernels, "decodes", lambda fmt, device: False)
    return seen


@pytest.mark.parametrize(("along", "pair", "routing", "n", "k"), CASES, ids=[case_id(*row) for row in CASES])
def test_products(along, pair, routing, n, k, dots):
    case = Case(along, pair, routing, "cpu", n, k)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")
    assert bool(dots) == (0 not in (sum(case.sizes), n, k)) and all(dot[0] == 128 for dot in dots)


@pytest.mark.parametrize("pair", [pair for _, pair in KINDS[:2]], ids=pair_id)
def test_a_bias_and_a_sum(pair):
    case = Case("", pair, ([70], 0), "cpu", 40, 300)
    bias, before = torch.linspace(-9, 9, 40), torch.randn(70, 40)
    out = case.run(torch.bfloat16, bias=bias, backend="triton")
    assert_within_budget(out, case.a, case.b, 300, accumulation_unit("triton", pair[0], "cpu"), bias)
    assert torch.equal(case.add(before.clone(), backend="triton"), before + case.run(backend="triton"))


def test_a_scale_that_is_nan_stays():
    case = Case(*KINDS[0], ([20], 0), "cpu", 20, 64)
    case.a.scale.view(torch.uint8)[3, 1] = 0x7F
    out = case.run(backend="triton")
    assert out[3].isnan().all() and out.isnan().sum() == 20
