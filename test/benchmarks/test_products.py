"""The GEMMs that benchmarks time and those of peers: shapes, operands and bytes are a layer's, errors are found."""

import math

import bench_linear
import pytest
import torch
from common import peers, shapes
from common.errors import Unavailable
from common.products import KINDS, RECIPES, Product, decoded, error_budget, product_error

from torchao_blockwise import ops
from torchao_blockwise.testing import relative_error

CPU = torch.device("cpu")
# tokens, which no copy is padded for, N, K
TOKENS, N, K = LAYER = (64, 320, 192)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_layers(kind, recipe):
    product = Product(kind, *LAYER, recipe)
    torch.manual_seed(0)
    a, b, qa, qb = product.make(CPU)
    assert (*a.shape, b.shape[0]) == (product.mnk[0], product.mnk[2], product.mnk[1]) and a.shape[1] == b.shape[1]
    stored = {"output": (a, b), "grad_input": (a, b.t()), "grad_weight": (a.t(), b.t())}[kind]
    wanted = {"output": ((TOKENS, K), (N, K)), "grad_input": ((TOKENS, N), (N, K))}
    assert tuple(tuple(x.shape) for x in stored) == wanted.get(kind, ((TOKENS, N), (TOKENS, K)))
    assert all(x.is_contiguous() for x in stored) and product.flops == 2 * TOKENS * N * K
    assert (qa.format_name, qb.format_name) == tuple(fmt.name for fmt in product.formats)
    out = ops.matmul(qa, qb, out_dtype=torch.bfloat16)
    assert product.nbytes() == sum(t.nbytes for t in (*qa.tensors, *qb.tensors, out) if t is not None)
    assert relative_error(out, a.float() @ b.float().t()) < (0.05 if recipe == "fp8" else 0.2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ((300, 272, 400), (1, 1, 1), (129, 257, 16)), ids=str)
def test_the_error_of_a_right_product_is_within_budget_and_of_a_wrong_one_is_not(kind, recipe, layer):
    product = Product(kind, *layer, recipe)
    *_, a, b = product.make(CPU)
    out = ops.matmul(a, b, out_dtype=torch.bfloat16)
    a, b = decoded(a), decoded(b)
    assert product_error(out, a, b) < error_budget(product.mnk[2])
    for row, column in ((0, 0), (-1, -1), (0, -1), (-1, 0)):
        wrong = out.clone()
        wrong[row, column] += out.norm()
        assert product_error(wrong, a, b) > error_budget(product.mnk[2])
        wrong[row, column] = math.nan
        assert product_error(wrong, a, b) == math.inf


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(peers, "need_capability", lambda *args, **kwargs: None)
    monkeypatch.setattr(peers, "import_deep_gemm", lambda device: None)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    (
        ("cublaslt", (4097, 256, 256), "rows of 1x128 operands must be multiples of 4, got 4097"),
        ("tensorwise", (64, 250, 256), "N and K must be multiples of 16, got 250, 256"),
        ("deep_gemm", (4097, 256, 256), "rows of scales, for their copies by TMA, must be multiples of 4, got 4097"),
    ),
)
def test_a_peer_says_what_it_cannot(name, shape, message, any_device):
    with pytest.raises(Unavailable, match=message):
        peers.product_peer(name, Product("output", *shape), CPU)


@pytest.mark.parametrize("recipe", [recipe for recipe in bench_linear.RECIPES if recipe != "torchao"])
def test_a_converted_layer_computes_what_bf16_does(recipe, any_device):
    torch.manual_seed(0)
    x, dy = (torch.randn(64, width, dtype=torch.bfloat16) for width in (128, 256))
    x.requires_grad_()
    expected = bench_linear.make_layer(shapes.Shape(64, 256, 128), "bf16", CPU).step(x, dy)
    try:
        got = bench_linear.make_layer(shapes.Shape(64, 256, 128), recipe, CPU).step(x, dy)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torchao has no {recipe} without a GPU: {error}")
    assert max(relative_error(a, b) for a, b in zip(got, expected)) < bench_linear._BUDGETS[recipe]
