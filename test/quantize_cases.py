"""Formats, shapes and inputs for tests of ops.quantize, and kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, BlockFormat, Operand
from torchao_blockwise.testing import (
    SHAPES,
    assert_operands_equal,
    random_tensor,
    shape_id,
    with_special_values,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SQUARE = (FP8_128X128, NVFP4_16X16)
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
fp8_formats = pytest.mark.parametrize("fmt", (FP8_1X128, FP8_128X128), ids=lambda f: f.name)
nvfp4_formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda f: f.name)
shapes = pytest.mark.parametrize("shape", (*SHAPES, (2, 3, 130), (2, 17, 33), (2, 0, 16)), ids=shape_id)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
backends = pytest.mark.parametrize("backend", ("reference", "triton"))


def special_input(shape, fmt: BlockFormat, dtype, device: str) -> torch.Tensor:
    """Random values of many magnitudes with a zero, a subnormal, a huge and a negative zero block."""
    return with_special_values(random_tensor(*shape, dtype=dtype, device=device), fmt)


def canonical(q: Operand) -> Operand:
    """The operand with one bit pattern for every fp32 NaN: an fp32 NaN's payload is the hardware's choice."""
    parts = (t if t is None or t.dtype != torch.float32 else t.masked_fill(t.isnan(), float("nan")) for t in q.tensors)
    return Operand(*parts, q.format_name)


def rowwise_of(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    copies = ops.quantize(x, fmt, **options)
    assert copies.columnwise is None
    return copies.rowwise


def columnwise_of(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    copies = ops.quantize(x, fmt, rowwise=False, columnwise=True, **options)
    assert copies.rowwise is None
    return copies.columnwise


def check_against_reference(x: torch.Tensor, fmt: BlockFormat, backend: str, **options) -> None:
    """Rowwise, columnwise and both together give the bits of the reference's rowwise on `x` and its transpose."""
    rowwise = canonical(rowwise_of(x, fmt, backend="reference", **options))
    columnwise = canonical(rowwise_of(x.mT.contiguous(), fmt, backend="reference", **options))
    both = ops.quantize(x, fmt, columnwise=True, backend=backend, **options)
    assert_operands_equal(canonical(rowwise_of(x, fmt, backend=backend, **options)), rowwise)
    assert_operands_equal(canonical(columnwise_of(x, fmt, backend=backend, **options)), columnwise)
    assert_operands_equal(canonical(both.rowwise), rowwise)
    assert_operands_equal(canonical(both.columnwise), columnwise)
