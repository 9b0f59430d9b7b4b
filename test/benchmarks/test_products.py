"""The products that benchmarks time: shapes, operands and bytes are a layer's, and wrong results are found."""

from __future__ import annotations

import math

import pytest
import torch
from common.products import KINDS, RECIPES, Product, error_budget, product_error

from torchao_blockwise import ops
from torchao_blockwise.testing import relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")

LAYER = (64, 320, 192)  # tokens, which no copy is padded for, N, K


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_layers(kind, recipe):
    tokens, n, k = LAYER
    product = Product(kind, *LAYER, recipe)
    torch.manual_seed(0)
    a, b, qa, qb = product.make(CPU)
    assert (*a.shape, b.shape[0]) == (product.mnk[0], product.mnk[2], product.mnk[1]) and a.shape[1] == b.shape[1]
    stored = {"output": (a, b), "grad_input": (a, b.t()), "grad_weight": (a.t(), b.t())}[kind]
    shapes = {
        "output": ((tokens, k), (n, k)),
        "grad_input": ((tokens, n), (n, k)),
        "grad_weight": ((tokens, n), (tokens, k)),
    }
    assert tuple(tuple(x.shape) for x in stored) == shapes[kind]
    assert all(x.is_contiguous() for x in stored)
    assert (qa.format_name, qb.format_name) == tuple(fmt.name for fmt in product.formats)
    assert product.flops == 2 * tokens * n * k
    out = ops.matmul(qa, qb, out_dtype=torch.bfloat16)
    held = sum(t.nbytes for t in (*qa.tensors, *qb.tensors, out) if t is not None)
    assert product.nbytes() == held
    assert relative_error(out, a.float() @ b.float().t()) < (0.05 if recipe == "fp8" else 0.2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ((300, 272, 400), (1, 1, 1), (128, 128, 128), (129, 257, 16)), ids=str)
def test_the_error_of_a_right_product_is_within_budget_and_of_a_wrong_one_is_not(kind, recipe, layer):
    product = Product(kind, *layer, recipe)
    *_, a, b = product.make(CPU)
    out = ops.matmul(a, b, out_dtype=torch.bfloat16)
    assert product_error(out, a, b) < error_budget(product.mnk[2])
    for row, column in ((0, 0), (-1, -1), (0, -1), (-1, 0)):
        wrong = out.clone()
        wrong[row, column] += out.norm()
        assert product_error(wrong, a, b) > error_budget(product.mnk[2])
        wrong[row, column] = math.nan
        assert product_error(wrong, a, b) == math.inf
