"""The helpers that tests lean on: they see what they should, and fail when they should."""

import math

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, Copies
from torchao_blockwise.testing import (
    assert_bitwise_equal,
    assert_operands_equal,
    random_tensor,
    relative_error,
    sqnr,
    with_special_values,
)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=lambda d: str(d)[6:])
def test_random_tensor_is_reproducible_and_spans_magnitudes(dtype):
    x = random_tensor(64, 256, dtype=dtype)
    assert_bitwise_equal(x, random_tensor(64, 256, dtype=dtype))
    assert not torch.equal(x, random_tensor(64, 256, dtype=dtype, seed=1))
    for amax in (x.abs().amax(0), x.abs().amax(1)):
        assert amax.max() / amax.min() > 2**6
    assert (x.dtype, random_tensor(2, 0, 5).shape) == (dtype, (2, 0, 5))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_special_values_fill_whole_blocks_of_a_copy(fmt):
    x, (rows, columns) = torch.ones(256, 512), fmt.block
    blocks = with_special_values(x, fmt)[:rows, : 4 * columns].split(columns, 1)
    for block, value in zip(blocks, (0.0, 1e-40, torch.finfo(torch.float32).max, -0.0), strict=True):
        assert_bitwise_equal(block, torch.full_like(block, value))
    assert (x == 1).all()


DIFFERENT = {
    "values": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "1 of 2 differ; .*\\(\\(1,\\), 2.0, 3.0\\)"),
    "signs of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 differ"),
    "shapes": (torch.ones(2, 1), torch.ones(2), r"shape \[2, 1\], expected \[2\]"),
    "dtypes of nothing": (torch.ones(0), torch.ones(0).int(), "dtype torch.float32, expected torch.int32"),
    "fp8 bits": (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.125]).to(torch.float8_e4m3fn), "1 of 1"),
}


def test_bitwise_equal():
    assert_bitwise_equal(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_bitwise_equal(torch.ones(3, 2).mT, torch.ones(2, 3))
    for actual, expected, message in DIFFERENT.values():
        with pytest.raises(AssertionError, match=f"^some name: {message}"):
            assert_bitwise_equal(actual, expected, "some name")


def test_operands_equal_looks_at_the_format_and_at_every_field():
    q = ops.quantize(random_tensor(16, 32), NVFP4_1X16, backend="reference").rowwise
    assert_operands_equal(q, q._replace(qdata=q.qdata.clone()))
    for field in ("qdata", "scale", "global_scale"):
        other = getattr(q, field).clone()
        other.view(-1).view(torch.uint8)[0] ^= 1
        with pytest.raises(AssertionError, match=rf"^nvfp4_1x16\.{field}: 1 of"):
            assert_operands_equal(q, q._replace(**{field: other}))
    a, b = (ops.quantize(torch.ones(1, 128), fmt, backend="reference").rowwise for fmt in (FP8_1X128, FP8_128X128))
    wrong = {
        r"^global_scale: ": (q, q._replace(global_scale=None)),
        r"^fp8_1x128 is not fp8_128x128$": (a, b),
        r"^Operand is not Copies$": (a, Copies(a, None)),
    }
    for message, pair in wrong.items():
        with pytest.raises(AssertionError, match=message):
            assert_operands_equal(*pair)


def test_relative_error_and_sqnr():
    expected, actual = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_error(actual, expected) == pytest.approx(0.1)
    assert sqnr(actual, expected) == pytest.approx(20.0)
    assert relative_error(expected, expected) == 0 and sqnr(expected, expected) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == relative_error(torch.empty(0), torch.empty(0)) == 0
    assert relative_error(torch.ones(4), torch.zeros(4)) == 2.0
    # A NaN is not hidden.
    poisoned = torch.tensor([math.nan, 1.0])
    assert math.isnan(relative_error(poisoned, torch.ones(2))) and math.isnan(sqnr(poisoned, torch.ones(2)))
