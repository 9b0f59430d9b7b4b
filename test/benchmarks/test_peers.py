"""What others offer, as far as it goes on a CPU: stand-ins get the layouts that they document, reasons are told."""

from __future__ import annotations

from types import SimpleNamespace

import bench_linear
import pytest
import torch
import torch.nn.functional as F
from common import peers, shapes
from common.errors import Unavailable
from common.products import KINDS, Product, error_budget, product_error

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


@pytest.mark.parametrize("kind", KINDS)
def test_cublaslt_gets_what_our_own_call_gives_it(kind, any_device, monkeypatch):
    """K of five blocks, so that square scales are padded; they lie along K, one-row scales along rows."""
    calls = []
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **kwargs: calls.append((args, kwargs)) or torch.empty(0))
    product, hp, (a, b) = problem(kind, tokens=640, n=640, k=640)
    peer = peers.product_peer("cublaslt", product, CPU)
    peer.run(*peer.prepare(*hp, a, b))
    theirs = calls.pop()[0]
    types = F.ScalingType
    one_row = kind == "grad_weight"
    assert theirs[0] is a.qdata and theirs[1].t().data_ptr() == b.qdata.data_ptr()
    assert theirs[2].stride() == (1, a.qdata.shape[0]) and torch.equal(theirs[2], a.scale.t())
    assert theirs[3] is types.BlockWise1x128
    assert theirs[5] is (types.BlockWise1x128 if one_row else types.BlockWise128x128)
    assert torch.equal(theirs[4], b.scale.t() if one_row else F.pad(b.scale, (0, 3), value=1.0).t())
    assert theirs[4].stride(0) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_deep_gemm_gets_its_scale_layouts(kind, any_device, monkeypatch):
    """A stand-in that reads scales as DeepGEMM documents them: [M, K/128] by columns, [N/128, K/128] or [N, K/128]."""

    def fp8_gemm_nt(a, b, d, c=None, recipe=None):
        (a, a_scale), (b, b_scale) = a, b
        one_row = recipe == (1, 1, 128)
        assert recipe in (None, (1, 1, 128)) and a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0
        assert one_row == (d.dtype is torch.float32) == (c is d)
        rows = b_scale if one_row else b_scale.repeat_interleave(128, 0)
        wide = [s.repeat_interleave(128, 1) for s in (a_scale, rows)]
        product = (a.float() * wide[0][:, : a.shape[1]]) @ (b.float() * wide[1][: b.shape[0], : b.shape[1]]).t()
        d.copy_(product + (c if c is not None else 0))

    monkeypatch.setattr(peers, "import_deep_gemm", lambda device: SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    product, hp, operands = problem(kind)
    peer = peers.product_peer("deep_gemm", product, CPU)
    arguments = peer.prepare(*hp, *operands)
    out = peer.run(*arguments)
    assert product_error(arguments[-1] if out is None else out, *operands) < error_budget(product.mnk[2])


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


def test_variants_of_torchao_that_are_the_same_code_are_tried_once():
    kernel = peers.torchao_kernels().triton_fp8_blockwise_act_quant_lhs_kernel
    assert len(kernel.configs) == 15 and len({c.num_stages for c in kernel.configs}) == 1
    assert {(c.num_warps, c.kwargs["NUM_GROUPS"]) for c in kernel.configs} == {
        (w, g) for w in (2, 4, 8) for g in (2, 16, 32, 64, 128)
    }
    kernels = vars(peers.torchao_kernels()).values()
    tuned = [kernel for kernel in kernels if hasattr(kernel, "configs")]
    assert len(tuned) >= 6 and {kernel.do_bench for kernel in tuned} == {peers._brief_bench}


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


def test_a_step_quantizes_the_weight_in_forward_and_in_backward():
    from helpers import weight_calls

    layer = bench_linear.make_layer(shapes.Shape(64, 256, 128), "fp8", CPU)
    x, dy = torch.ones(64, 128, dtype=torch.bfloat16).requires_grad_(), torch.ones(64, 256, dtype=torch.bfloat16)
    with weight_calls() as calls:
        layer.step(x, dy)
    assert (calls.quantize, calls.columnwise) == (2, 1)


def test_recipes_of_ours_in_fp8_have_the_same_weights():
    x, dy = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((64, 128), (64, 256)))
    steps = [
        bench_linear.make_layer(shapes.Shape(64, 256, 128), recipe, CPU).step(x.requires_grad_(), dy)
        for recipe in ("fp8", "fp8_primary")
    ]
    assert all(torch.equal(a, b) for step in steps[1:] for a, b in zip(step, steps[0], strict=True))
