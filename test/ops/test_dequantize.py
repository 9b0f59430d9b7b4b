"""ops.dequantize: error bounds an element, odd columns, output dtypes, refusals."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, BlockFormat, Operand
from torchao_blockwise.ops.quantization.reference import block_amax, expand_blocks
from torchao_blockwise.testing import SHAPES, assert_bitwise_equal, random_tensor, shape_id

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
fp8_formats = pytest.mark.parametrize("fmt", (FP8_1X128, FP8_128X128), ids=lambda f: f.name)
nvfp4_formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda f: f.name)
shapes = pytest.mark.parametrize("shape", (*SHAPES, (2, 17, 33)), ids=shape_id)
# What a few roundings in fp32 (scale, product, decode) may add to a bound.
FP32_SLACK = 1 + 4 * 2.0**-23


def quantize(x: torch.Tensor, fmt: BlockFormat, **options) -> Operand:
    return ops.quantize(x, fmt, backend="reference", **options).rowwise


def amax_of_each_element(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """The amax of the block that an element lies in, [.., M, K] fp64."""
    return expand_blocks(block_amax(x, fmt), fmt, *x.shape[-2:]).double()


def error(x: torch.Tensor, q) -> torch.Tensor:
    return (ops.dequantize(q, dtype=torch.float64, columns=x.shape[-1]) - x.double()).abs()


@shapes
@fp8_formats
@pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("div", "pow2"))
def test_fp8_error_is_half_an_ulp_of_e4m3(fmt, shape, power_of_2_scales):
    x = random_tensor(*shape)
    # 4 significant bits: half an ulp is 2^-4 of the value, and 2^-10 of the scale below the normal numbers. With a
    # power of two the scale is up to twice as large.
    scale = amax_of_each_element(x, fmt) / 448 * (2 if power_of_2_scales else 1)
    bound = torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10) * FP32_SLACK
    assert (error(x, quantize(x, fmt, power_of_2_scales=power_of_2_scales)) <= bound).all()


@shapes
@nvfp4_formats
def test_nvfp4_error_is_half_a_step_of_e2m1(fmt, shape):
    x = random_tensor(*shape)
    q = quantize(x, fmt)
    scale = expand_blocks(q.scale.double(), fmt, *shape[-2:]) * q.global_scale.double()
    amax = amax_of_each_element(x, fmt)
    # The stored scale is amax / 6 within half an ulp of e4m3: 2^-4 of it, 2^-10 global scales below the normal numbers.
    scale_bound = torch.maximum(amax / 6 * 2.0**-4, 2.0**-10 * q.global_scale.double())
    assert ((scale - amax / 6).abs() <= scale_bound * FP32_SLACK).all()
    # Half a step of e2m1: 1/4 below 2; 1/2 from 2 to 4, 1 from 4 to 6: a quarter of the value. Beyond 6: saturation.
    step = torch.maximum(scale * 0.25, x.double().abs() * 0.25)
    bound = torch.maximum(step, x.double().abs() - 6 * scale)
    assert (error(x, q) <= bound * FP32_SLACK).all()


@formats
def test_numbers_of_the_format_survive_unchanged(fmt):
    if fmt.has_global_scale:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0])
        # 2688 = 6 · 448 makes the global scale 1; each block then holds 6 times a power of two.
        x = torch.stack([values * 2.0**e for e in range(-3, 8) for _ in range(16)])
        x[-16:] = values * 448
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        x = codes[codes.isfinite()].repeat(128, 2)[:, :384].contiguous()
        x[:, [0, 128, 256]] = 448.0
    assert_bitwise_equal(ops.dequantize(quantize(x, fmt)), x)


@fp8_formats
def test_quantizing_what_was_decoded_changes_nothing(fmt):
    """Power-of-two scales are reproduced or halved, in both cases exactly."""
    decoded = ops.dequantize(quantize(random_tensor(64, 256), fmt, power_of_2_scales=True))
    assert_bitwise_equal(ops.dequantize(quantize(decoded, fmt, power_of_2_scales=True)), decoded)


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


@formats
def test_columnwise_decodes_to_the_transpose_where_blocks_allow(fmt):
    x = random_tensor(40, 144)
    rowwise, columnwise = ops.quantize(x, fmt, columnwise=True, backend="reference")
    decoded = ops.dequantize(columnwise)
    assert decoded.shape == (144, 40)
    assert torch.equal(decoded, ops.dequantize(rowwise).mT) == fmt.is_square


Q, PACKED = (quantize(torch.ones(2, 32), fmt) for fmt in (FP8_1X128, NVFP4_1X16))
_DTYPE = "dtype must be bfloat16, float16, float32 or float64, got {}"
REFUSALS = {
    "plain tuple": (tuple(Q), {}, "x must be a result of quantize, got tuple; quantize it first"),
    "tensor": (torch.ones(2, 32), {}, "x must be a result of quantize, got Tensor; quantize it first"),
    **{str(t): (Q, {"dtype": t}, _DTYPE.format(t)) for t in (torch.int32, torch.float8_e4m3fn)},
    "columns": (Q, {"columns": 31}, "the payload has 32 columns, got columns=31"),
    "columns of packed payload": (PACKED, {"columns": 30}, "the payload has 32 columns, got columns=30"),
}


@pytest.mark.parametrize(("x", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(x, options, message):
    with pytest.raises(ValueError if "columns" in options else TypeError) as error:
        ops.dequantize(x, **options)
    assert str(error.value) == f"dequantize: {message}"
