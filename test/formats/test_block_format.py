"""BlockFormat: the registry, the grids, and that a format made up here works in the generic references at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    E4M3,
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockFormat,
    CastOptions,
    Operand,
    Scales,
    get_format,
    register_format,
)
from torchao_blockwise.ops.dequantization import reference as dequantize
from torchao_blockwise.ops.gemm import reference as matmul_reference
from torchao_blockwise.ops.quantization import reference as quantize_reference
from torchao_blockwise.ops.transposition import reference as transpose
from torchao_blockwise.testing import assert_operands_equal, random_tensor, relative_error


def test_registered_formats():
    assert list(FORMATS) == ["fp8_1x128", "fp8_128x128", "nvfp4_1x16", "nvfp4_16x16"]
    for fmt, block in zip(FORMATS.values(), [(1, 128), (128, 128), (1, 16), (16, 16)], strict=True):
        assert fmt.block == block and fmt.is_square == (block[0] > 1)
        assert get_format(fmt.name) is get_format(fmt) is fmt and repr(fmt) == f"BlockFormat({fmt.name})"


def test_unknown_and_taken_names():
    message = "no block format 'mxfp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16"
    for name in ("mxfp8", MXFP8):
        with pytest.raises(ValueError, match=f"^{message}$"):
            get_format(name)
    x = Operand(*FP8_1X128.new_empty(torch.empty(0), 1, 128), None, "mxfp8")
    with pytest.raises(ValueError, match=r"^dequantize: x has no format 'mxfp8'; the formats are fp8_1x128, fp8_128x1"):
        ops.dequantize(x)
    with pytest.raises(ValueError, match=r"^register_format: fp8_1x128 is registered already; choose another name$"):
        register_format(FP8_1X128)
    assert FORMATS["fp8_1x128"] is FP8_1X128


@pytest.mark.parametrize(
    ("fmt", "shape", "qdata", "scale"),
    (
        (FP8_1X128, (3, 129), (3, 129), (2, 3)),
        (FP8_1X128, (5, 3, 129), (5, 3, 129), (5, 2, 3)),
        (FP8_128X128, (129, 128), (129, 128), (2, 1)),
        (NVFP4_1X16, (3, 17), (3, 9), (3, 2)),
        (NVFP4_16X16, (7, 17, 33), (7, 17, 17), (7, 2, 3)),
        (NVFP4_16X16, (0, 16), (0, 8), (0, 1)),
        (FP8_1X128, (3, 0), (3, 0), (0, 3)),
    ),
    ids=lambda p: p.name if isinstance(p, BlockFormat) else "x".join(map(str, p)),
)
def test_shapes_of_payload_and_scales(fmt, shape, qdata, scale):
    assert (fmt.qdata_shape(*shape), fmt.scale_shape(*shape)) == (qdata, scale)


def _mxfp8_scales(block_amax: torch.Tensor, tensor_amax: torch.Tensor | None, power_of_2_scales: bool) -> Scales:
    """scale = 2^(floor(log2 amax) - 8), stored as its biased exponent; 2^-127 for a zero block. NaN: 255."""
    exponent = (torch.frexp(block_amax).exponent - 1 - 8).clamp(-127, 127)
    exponent = torch.where(block_amax == 0, -127, exponent)
    biased = torch.where(block_amax.isfinite(), exponent + 127, 255).to(torch.uint8)
    return Scales(torch.exp2(-exponent.float()), biased.view(torch.float8_e8m0fnu), None)


MXFP8 = BlockFormat(
    name="mxfp8", element=E4M3, block=(1, 32), scale_dtype=torch.float8_e8m0fnu, compute_scales=_mxfp8_scales
)
MXFP8_SQUARE = dataclasses.replace(MXFP8, name="mxfp8_square", block=(32, 32))
made_up = pytest.mark.parametrize("fmt", (MXFP8, MXFP8_SQUARE), ids=lambda fmt: fmt.name)


@pytest.fixture
def registered():
    """The formats made up here are known while a test runs."""
    for fmt in (MXFP8, MXFP8_SQUARE):
        assert register_format(fmt) is get_format(fmt.name) is fmt
    yield
    for fmt in (MXFP8, MXFP8_SQUARE):
        del FORMATS[fmt.name]


@made_up
def test_made_up_format_quantizes_and_dequantizes(fmt, registered):
    x = random_tensor(45, 70)
    q = quantize_reference.quantize_rows(x, CastOptions(fmt))
    assert (q.qdata.shape, q.scale.shape) == (fmt.qdata_shape(45, 70), fmt.scale_shape(45, 70))
    assert q.format is fmt and q.scale.dtype is torch.float8_e8m0fnu
    block = x[:1, :32] if fmt is MXFP8 else x[:32, :32]
    assert q.scale[0, 0].float() == 2.0 ** (block.abs().max().log2().floor() - 8)
    decoded = dequantize(q, 70, torch.float32)
    amax = quantize_reference.expand_blocks(quantize_reference.block_amax(x, fmt), fmt, 45, 70)
    # Half an ulp of e4m3, 2^-10 of a scale that is 2^-8 of the amax or less; or what saturates: an amax of up to
    # 512 · scale meets a largest element of 448.
    half_ulp = torch.maximum(x.abs() * 2.0**-4, amax * 2.0**-18)
    saturated = torch.where(x.abs() > amax / 2, x.abs() / 8, 0.0)
    assert ((decoded - x).abs() <= torch.maximum(half_ulp, saturated)).all()


@made_up
def test_made_up_format_takes_any_numbers(fmt, registered):
    x = torch.zeros(64, 64)
    x[0, 0], x[0, 32], x[32, 0] = float("nan"), float("inf"), 1e-40
    decoded = dequantize(quantize_reference.quantize_rows(x, CastOptions(fmt)), 64, torch.float32)
    assert decoded[0].isnan().all()
    assert (decoded[-1] == 0).all()


def test_made_up_format_transposes_exactly_and_multiplies(registered):
    a, b = random_tensor(45, 70, seed=1), random_tensor(33, 70, seed=2)
    qa, qb = (quantize_reference.quantize_rows(x, CastOptions(f)) for x, f in ((a, MXFP8), (b, MXFP8_SQUARE)))
    assert_operands_equal(transpose(qb, 70), quantize_reference.quantize_rows(b.mT, CastOptions(MXFP8_SQUARE)))
    decoded = [dequantize(q, 70, torch.float64) for q in (qa, qb)]
    out = matmul_reference.matmul(qa, qb, torch.float32, None)
    # Power-of-two scales are exact; what is left is the fp32 accumulation of 70 terms.
    assert relative_error(out, decoded[0] @ decoded[1].mT) <= 70 * 2.0**-24
