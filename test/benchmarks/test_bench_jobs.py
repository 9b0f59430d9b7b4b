"""The jobs of benchmarks, their shapes, rooflines and errors: bytes that must move, checks that find wrong results."""

import math

import bench_fused
import bench_permute
import bench_quantize
import pytest
import torch
from bench_grouped_matmul import KINDS, GroupedProduct
from common import driver, errors, roofline, shapes
from common.errors import Wrong, check_bits, tensors
from common.shapes import ROUTINGS, Experts, group_ends

from torchao_blockwise import ops
from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
QUANTIZED = [
    (case, recipe)
    for case in bench_quantize.CASES
    for recipe in ("fp8", "nvfp4")
    if recipe == "nvfp4" or case not in bench_quantize.NVFP4_ONLY
]
JOBS = [
    *(bench_quantize.job(case, 33, 64, recipe, CPU) for case, recipe in QUANTIZED if recipe == "fp8"),
    *(bench_fused.job(case, 33, 64, CPU) for case in bench_fused.CASES),
    *(bench_permute.job(operation, *shapes.ROUTED["smoke"], CPU) for operation in bench_permute.OPERATIONS),
]


@pytest.mark.parametrize(("case", "recipe"), QUANTIZED)
def test_bytes_that_quantizers_must_move(case, recipe):
    # Rows that need no padding, which is not counted; nor are 24 bytes of a key, and a second tensor scale.
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


def test_a_floor_is_the_greater_of_bytes_and_operations():
    ceilings = roofline.Ceilings(copy=4.0, bf16=800.0, fp8=1250.0)
    assert ceilings.floor_us(4 * 10**12) == pytest.approx(1e6)
    assert ceilings.floor_us(0, 80 * 10**12, "bf16") == pytest.approx(1e5)
    assert ceilings.floor_us(8 * 10**6, 10**6) == pytest.approx(2.0)


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
