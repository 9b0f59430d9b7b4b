"""What others offer, as far as it goes on a CPU: stand-ins get the layouts that they document, reasons are told."""

from __future__ import annotations

import bench_linear
import pytest
import torch
from common import peers, shapes
from common.errors import Unavailable
from common.products import KINDS, Product, product_error

from torchao_blockwise.testing import relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(peers, "need_capability", lambda *args, **kwargs: None)


def problem(kind, tokens=256, n=384, k=256, device=CPU):
    torch.manual_seed(0)
    product = Product(kind, tokens, n, k)
    *hp, a, b = product.make(device)
    return product, hp, (a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("bf16", "tensorwise"))
def test_peers_that_quantize_by_themselves_compute_the_same_product(name, kind, device):
    product, hp, operands = problem(kind, device=torch.device(device))
    peer = peers.product_peer(name, product, torch.device(device))
    assert product_error(peer.run(*peer.prepare(*hp, *operands)), *operands) < 0.1


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    (
        ("cublaslt", (4097, 256, 256), "rows of 1x128 operands must be multiples of 4, got 4097"),
        ("tensorwise", (64, 250, 256), "N and K must be multiples of 16, got 250, 256"),
        ("deep_gemm", (4097, 256, 256), "rows of scales, for their copies by TMA, must be multiples of 4, got 4097"),
    ),
)
def test_a_peer_says_what_it_cannot(name, shape, message, any_device, monkeypatch):
    monkeypatch.setattr(peers, "import_deep_gemm", lambda device: None)
    with pytest.raises(Unavailable, match=message):
        peers.product_peer(name, Product("output", *shape), CPU)


@pytest.mark.parametrize("recipe", [recipe for recipe in bench_linear.RECIPES if recipe != "torchao"])
def test_a_converted_layer_computes_what_bf16_does(recipe, any_device):
    torch.manual_seed(0)
    x, dy = (torch.randn(64, width, dtype=torch.bfloat16) for width in (128, 256))
    x.requires_grad_()
    expected = bench_linear.make_layer(shapes.Shape(64, 256, 128), "bf16", CPU).step(x, dy)
    try:
        layer = bench_linear.make_layer(shapes.Shape(64, 256, 128), recipe, CPU)
        got = layer.step(x, dy)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torchao has no {recipe} without a GPU: {error}")
    assert max(relative_error(a, b) for a, b in zip(got, expected)) < bench_linear._BUDGETS[recipe]
