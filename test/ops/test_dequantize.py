"""ops.dequantize: odd columns and output dtypes. Values are compared with numerics.md in formats/test_numerics.py."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, NVFP4_1X16, NVFP4_16X16, BlockFormat, Operand
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
nvfp4_formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda f: f.name)


def quantize(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    return ops.quantize(x, fmt, backend="reference", **options).rowwise


@nvfp4_formats
@pytest.mark.parametrize("columns", (1, 15, 17, 33))
def test_odd_columns(fmt, columns):
    x = random_tensor(5, columns)
    q = quantize(x, fmt)
    held = ops.dequantize(q)
    assert held.shape == (5, columns + 1)
    assert (held[:, -1] == 0).all()
    assert_bitwise_equal(ops.dequantize(q, columns=columns), held[:, :columns])


@formats
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=lambda d: str(d)[6:]
)
def test_rounds_once_to_the_dtype(fmt, dtype):
    q = quantize(random_tensor(33, 150), fmt)
    assert_bitwise_equal(ops.dequantize(q, dtype=dtype), ops.dequantize(q).to(dtype))
