"""The jobs of benchmarks, their shapes, rooflines and errors: bytes that must move, checks that find wrong results."""

from __future__ import annotations

import math

import bench_fused
import bench_linear
import bench_permute
import bench_quantize
import pytest
import torch
from bench_grouped_matmul import KINDS, GroupedProduct
from common import driver, errors, peers, shapes
from common.errors import Unavailable, Wrong, check_bits, tensors
from common.products import KINDS as PRODUCTS
from common.products import RECIPES, Product, decoded, error_budget, product_error
from common.shapes import ROUTINGS, Experts, group_ends

from torchao_blockwise import ops
from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
CPU = torch.device("cpu")
JOBS = [
    *(bench_quantize.job(case, 33, 64, "fp8", CPU) for case in bench_quantize.CASES),
    *(bench_fused.job(case, 33, 64, CPU) for case in bench_fused.CASES),
    *(bench_permute.job(operation, *shapes.ROUTED["smoke"], CPU) for operation in bench_permute.OPERATIONS),
]


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4"))
@pytest.mark.parametrize("case", bench_quantize.CASES)
def test_bytes_that_quantizers_must_move(case, recipe):
    # Rows that need no padding, which is not counted.
    job = bench_quantize.job(case, 224, 320, recipe, CPU)
    inputs = job.make()
    moved = sum(t.nbytes for t in tensors((inputs[:1], job.ours(inputs)["ours"](*inputs))))
    # The scale of a tensor is read with it and counted once; NVFP4 reads the input twice.
    again = inputs[0].nbytes if recipe == "nvfp4" and case != "transpose" else 0
    assert job.nbytes == moved + again


def spoilt(x):
    """`x` with another first byte in its last tensor with several elements."""
    flat = [t for t in tensors(x) if t.numel() > 1]
    flat[-1].view(-1).view(torch.uint8)[0] += 1
    return x


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.where)
def test_a_byte_that_is_wrong_is_seen(job):
    """Sums in another order may differ in their last bits, not by a percent."""
    torch.manual_seed(0)
    inputs = job.make()
    run = job.ours(inputs)["ours"]
    job.check(run(*inputs), inputs, None)
    for name, peer in job.peers.items():
        if name != "torchao":
            found = peer()
            job.check(found.run(*found.prepare(*inputs)), inputs, found)
    out = run(*inputs)
    if job.labels.get("operation") == "backward":
        out = out[0], out[1] * 1.01
    elif job.labels.get("case") == "rms_rowwise":
        out = [None if s is None else s * 1.01 for s in out[0]], out[1]
    else:
        out = spoilt(out)
    with pytest.raises(Wrong, match=r"relative error 0\.01|bits differ"):
        job.check(out, inputs, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_group_is_seen(kind):
    """Of each size, and one without tokens, whose gradient is zero."""
    product = GroupedProduct.of(kind, (0, 3, 20, 0, 9), 32, 48)
    ends = product.ends(CPU)
    a, b = product.quantize(*product.high_precision(CPU), ends)
    out = ops.grouped_matmul(a, b, ends, along=product.along, out_dtype=torch.float32)
    assert product.error(out, a, b) < 1e-5
    for g, rows in ((1, slice(0, 3)), (2, slice(3, 23)), (4, slice(23, 32)), (0, None)):
        wrong = out.clone()
        if product.along == "k":
            wrong[g] += 1
        elif rows is not None:
            wrong[rows] *= 1.1
        else:
            continue
        assert product.error(wrong, a, b) > 0.05


def test_bits_are_compared_as_bits():
    check_bits((torch.tensor(math.nan),), (torch.tensor(math.nan),))
    for wrong, right in ((torch.zeros(2), -torch.zeros(2)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(Wrong, match="bits differ"):
            check_bits(wrong, right)


# --- GEMMs of linear layers -------------------------------------------------------------------------------------------

# tokens, which no copy is padded for, N, K
TOKENS, N, K = LAYER = (64, 320, 192)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", PRODUCTS)
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
@pytest.mark.parametrize("kind", PRODUCTS)
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


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(peers, "need_capability", lambda *args, **kwargs: None)
    monkeypatch.setattr(peers, "import_deep_gemm", lambda device: None)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("name", ("bf16", "tensorwise"))
def test_peers_that_quantize_by_themselves_compute_the_same_product(name, kind, device):
    torch.manual_seed(0)
    product = Product(kind, 256, 384, 256)
    *hp, a, b = product.make(torch.device(device))
    peer = peers.product_peer(name, product, torch.device(device))
    assert product_error(peer.run(*peer.prepare(*hp, a, b)), decoded(a), decoded(b)) < 0.1


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


# --- parts ------------------------------------------------------------------------------------------------------------


def chosen(named: dict, *argv: str, smoke: bool = False) -> list:
    args = driver.parser("", (named, "large")).parse_args(argv)
    args.smoke = smoke
    shapes.choose(args)
    return args.shapes


def test_shapes_are_chosen_by_name_or_size_once_each(capsys):
    first, second, third = shapes.LINEAR["large"]
    assert chosen(shapes.LINEAR, "--shapes", "16384x14336x4096", "large") == [third, first, second]
    assert chosen(shapes.LINEAR) == shapes.LINEAR["large"]
    assert chosen(shapes.LINEAR, smoke=True) == shapes.LINEAR["smoke"]
    assert chosen(shapes.MIXTURES, "--shapes", "5x4x3x2") == [Experts(5, 4, 3, 2)]
    for text in ("mixtral", "5x4x3", "5x4x3x0", "5x4x3xa"):
        with pytest.raises(SystemExit):
            chosen(shapes.MIXTURES, "--shapes", text)
        assert f"no shape '{text}'; give tokens x experts x hidden x dim" in capsys.readouterr().err


@pytest.mark.parametrize("count", (1, 3, 128), ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_an_expert(routing, count):
    ends = group_ends(routing, 1000, count, torch.device("cpu"))
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32 and ends[-1] == 1000 and (sizes >= 0).all()
    if count > 1:
        spread = (sizes.max() / sizes.float().mean()).item()
        assert {"balanced": spread < 1.1, "skewed": spread > 1.5, "empty": (sizes == 0).sum() >= count // 2}[routing]


def test_errors_are_relative_to_what_was_expected(monkeypatch):
    expected = torch.randn(7, 5, dtype=torch.bfloat16)
    actual = expected.float() * 1.01
    monkeypatch.setattr(errors, "_PIECE", 8)
    assert errors.relative_error(actual.t(), expected.t()) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(expected, expected) == 0 == errors.relative_error(expected[:0], expected[:0])
    actual[6, 4] = math.nan
    assert math.isnan(errors.relative_error(actual, expected))
    for error in (math.nan, 0.2):
        with pytest.raises(Wrong, match=f"relative error {error:.2g} above 0.1"):
            errors.check(error, 0.1)
