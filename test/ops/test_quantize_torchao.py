"""ops.quantize gives the bits of torchao's own reference of the FP8 blocks."""

from __future__ import annotations

import pytest
import torch
from quantize_cases import columnwise_of, rowwise_of

from torchao_blockwise.formats import FP8_1X128, FP8_128X128
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
