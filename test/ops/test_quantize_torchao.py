"""ops.quantize gives the bits of torchao's own references, in eager PyTorch.

In NVFP4 where the arithmetic is exact: torchao divides by 6 and by the tensor scale where ours multiplies, in fp32, and
raises a block scale below 2^-6 to it. With bf16 values and a tensor scale that is a power of two neither shows.
"""

from __future__ import annotations

import pytest
import torch
from quantize_cases import LARGEST, columnwise_of, nvfp4_input, rowwise_of

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import (
    assert_bitwise_equal,
    random_tensor,
    shape_id,
)

TORCHAO_SHAPES = pytest.mark.parametrize("shape", ((128, 128), (256, 384), (384, 128)), ids=shape_id)


def torchao_input(shape) -> torch.Tensor:
    x = random_tensor(*shape, seed=4)
    x[:, :128] = 0.0
    x[:, 64] = 3e-13
    x[0, 0] = 1e30
    return x


def torchao_reference(name: str):
    from torchao.prototype.blockwise_fp8_training import kernels

    return getattr(kernels, name)


@TORCHAO_SHAPES
def test_rowwise_1x128_is_torchaos(shape):
    x = torchao_input(shape)
    qdata, scale = torchao_reference("torch_blockwise_scale_act_quant_lhs")(x)
    ours = rowwise_of(x, FP8_1X128, backend="reference")
    assert_bitwise_equal(ours.qdata, qdata, "qdata")
    assert_bitwise_equal(ours.scale, scale.mT, "scale")


@TORCHAO_SHAPES
def test_columnwise_1x128_is_torchaos(shape):
    x = torchao_input(shape)
    qdata, scale = torchao_reference("torch_blockwise_scale_act_quant_rhs")(x)
    ours = columnwise_of(x, FP8_1X128, backend="reference")
    assert_bitwise_equal(ours.qdata, qdata.mT, "qdata")
    assert_bitwise_equal(ours.scale, scale, "scale")


@TORCHAO_SHAPES
def test_rowwise_128x128_is_torchaos(shape):
    x = torchao_input(shape)
    qdata, scale = torchao_reference("torch_blockwise_scale_weight_quant")(x)
    ours = rowwise_of(x, FP8_128X128, backend="reference")
    assert_bitwise_equal(ours.qdata, qdata, "qdata")
    assert_bitwise_equal(ours.scale, scale, "scale")


# A tensor scale of 2^-4.
NVFP4_AMAX = torch.tensor(LARGEST)
# torchao's and TransformerEngine's.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NVFP4_SHAPES = pytest.mark.parametrize("shape", ((16, 16), (48, 256), (160, 80)), ids=shape_id)


def torchaos_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, scales [rows, K/16]) of 1×16 blocks."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    scale, qdata = nvfp4.nvfp4_quantize(x.contiguous(), per_tensor_scale=nvfp4.per_tensor_amax_to_scale(NVFP4_AMAX))
    return qdata, scale


@pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
@NVFP4_SHAPES
def test_nvfp4_is_torchaos(shape, fmt):
    """Square blocks too, whose rows and columns all have the block's amax, and so its scale in blocks of one row."""
    x = nvfp4_input(shape)
    copies = ops.quantize(x, fmt, columnwise=True, tensor_amax=NVFP4_AMAX, backend="reference")
    for ours, values in ((copies.rowwise, x), (copies.columnwise, x.mT)):
        qdata, scale = torchaos_nvfp4(values)
        assert_bitwise_equal(ours.qdata, qdata, "qdata")
        assert_bitwise_equal(
            ours.scale.view(torch.uint8).repeat_interleave(fmt.block[0], 0), scale.view(torch.uint8), "scale"
        )
        assert ours.global_scale == 2.0**-4


@NVFP4_SHAPES
def test_nvfp4_of_the_transform_is_torchaos(shape):
    """torchao's matrix of the transform, multiplied in fp64 and rounded to bf16 once, as exact sums are in fp32."""
    utils = pytest.importorskip("torchao.prototype.moe_training.nvfp4_training.hadamard_utils")
    matrix = utils.get_rht_matrix(SIGNS, torch.device("cpu"), torch.bfloat16, 16)
    x = nvfp4_input(shape) / 16
    transformed = (x.mT.reshape(-1, 16).double() @ matrix.double()).view(shape[1], shape[0]).bfloat16()
    assert transformed.abs().unflatten(1, (-1, 16)).amax(-1).min() > 6 * 2.0**-10
    ours = ops.quantize(
        x,
        NVFP4_1X16,
        rowwise=False,
        columnwise=True,
        hadamard=True,
        tensor_amax=(NVFP4_AMAX, NVFP4_AMAX),
        backend="reference",
    ).columnwise
    qdata, scale = torchaos_nvfp4(transformed)
    assert_bitwise_equal(ours.qdata, qdata, "qdata")
    assert_bitwise_equal(ours.scale, scale, "scale")
