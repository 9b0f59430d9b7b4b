"""NVFP4 products as FP4 tensor cores are given them: the interpreter takes `tl.dot_scaled` by its documented formula.

Packed elements and block scales reach the dot as they lie in memory, so what can be wrong is which of them: rows and
columns, first and second element of a byte, masks at ragged ends, scales of square blocks.
"""

from __future__ import annotations

import pytest
import torch
from grouped_products import PAIRS, ROUTINGS, Case, assert_close_to_each_group
from product_budgets import accumulation_unit, assert_within_budget, pair_id

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import random_tensor

interpreter = pytest.importorskip("triton.runtime.interpreter")
kernels = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_triton")

# (M, N, K): empty in each dim, one element, one block, ragged in each dim, odd K, several tiles.
PRODUCTS = (
    (0, 16, 32), (16, 0, 32), (16, 16, 0), (1, 1, 1), (1, 16, 128), (33, 47, 65), (63, 100, 500), (130, 129, 592),
)  # fmt: skip
NVFP4_PAIRS = (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)
pairs = pytest.mark.parametrize("pair", NVFP4_PAIRS, ids=pair_id)
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def decoded(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, 2 · bytes] float64; the first element of a byte is in its low bits, and 16 elements share a scale."""
    codes = torch.stack((payload & 15, payload >> 4), -1).flatten(1).long()
    signs = 1 - 2 * (codes >> 3)
    return signs * MAGNITUDES[codes & 7] * scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)


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
        out = sums.double() + decoded(x, xs.view(torch.uint8)) @ decoded(y.mT, ys.view(torch.uint8)).mT
        return interpreter.TensorHandle(out.float().numpy(), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)
    monkeypatch.setattr(kernels, "decodes", lambda fmt, device: False)
    return seen


def quantized(product, pair):
    """Operands a [M, K] and b [N, K]; their products stay within fp16."""
    m, n, k = product
    a, b = random_tensor(m, k, seed=1) * 2.0**-6, random_tensor(n, k, seed=2) * 2.0**-6
    return tuple(ops.quantize(x, fmt, backend="reference").rowwise for x, fmt in zip((a, b), pair))


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pairs
def test_shapes(pair, product, dots):
    a, b = quantized(product, pair)
    out = ops.matmul(a, b, out_dtype=torch.float32, backend="triton")
    assert_within_budget(out, a, b, product[2], accumulation_unit("triton", pair[0], "cpu"))
    assert bool(dots) == (0 not in product) and all(dot[0] == 128 for dot in dots)


@pairs
def test_a_bias_and_a_sum(pair):
    a, b = quantized((70, 40, 300), pair)
    bias, before = torch.linspace(-9, 9, 40), torch.randn(70, 40)
    unit = accumulation_unit("triton", pair[0], "cpu")
    assert_within_budget(ops.matmul(a, b, out_dtype=torch.bfloat16, bias=bias, backend="triton"), a, b, 300, unit, bias)
    out = ops.matmul(a, b, out_dtype=torch.float32, backend="triton")
    assert torch.equal(ops.add_matmul_(before.clone(), a, b, backend="triton"), before + out)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize(
    ("along", "pair"),
    [(along, pair) for along in PAIRS for pair in PAIRS[along] if pair in NVFP4_PAIRS],
    ids=lambda x: x if isinstance(x, str) else pair_id(x),
)
def test_groups(along, pair, routing, dots):
    case = Case(along, pair, routing, "cpu")
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")
    assert dots or not sum(case.sizes)


def test_a_scale_that_is_nan_stays():
    a, b = quantized((20, 20, 64), NVFP4_PAIRS[0])
    a.scale.view(torch.uint8)[3, 1] = 0x7F
    out = ops.matmul(a, b, out_dtype=torch.float32, backend="triton")
    assert out[3].isnan().all() and out.isnan().sum() == 20
