"""ops.quantize is bitwise identical to torchao's references, in eager PyTorch.

In NVFP4 torchao divides by 6 and by the tensor scale where ours multiplies, and raises a block scale below 2^-6 to it.
Both are equal where that is exact: bf16 values, and a tensor scale that is a power of two. Any values are compared with
the formula in formats/test_numerics.py, which is TransformerEngine's. Groups and experts are compared with tensors that
are quantized one by one in test_quantize_groups.py.
"""

import pytest
import torch
from quantize_cases import LARGEST, nvfp4_input

from torchao_blockwise import ops
from torchao_blockwise.formats import DEFAULT_SIGNS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, shape_id

# A tensor scale of 2^-4.
NVFP4_AMAX = torch.tensor(LARGEST)
nvfp4_shapes = pytest.mark.parametrize("shape", ((16, 16), (48, 256), (160, 80)), ids=shape_id)
nvfp4_formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)

# --- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((128, 128), (256, 384), (384, 128)), ids=shape_id)
def test_fp8_is_torchaos(shape):
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = random_tensor(*shape, seed=4)
    x[:, :128] = 0.0
    x[:, 64] = 3e-13
    x[0, 0] = 1e30
    rowwise, columnwise = ops.quantize(x, FP8_1X128, columnwise=True, backend="reference")
    square = ops.quantize(x, FP8_128X128, backend="reference").rowwise
    qdata, scale = kernels.torch_blockwise_scale_act_quant_lhs(x)
    assert_bitwise_equal(rowwise.qdata, qdata, "qdata")
    assert_bitwise_equal(rowwise.scale, scale.mT, "scale")
    qdata, scale = kernels.torch_blockwise_scale_act_quant_rhs(x)
    assert_bitwise_equal(columnwise.qdata, qdata.mT, "columnwise qdata")
    assert_bitwise_equal(columnwise.scale, scale, "columnwise scale")
    qdata, scale = kernels.torch_blockwise_scale_weight_quant(x)
    assert_bitwise_equal(square.qdata, qdata, "square qdata")
    assert_bitwise_equal(square.scale, scale, "square scale")


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def torchaos(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(payload, block scales, tensor scales), with tensor scales of these amaxes, which broadcast."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    outer = nvfp4.per_tensor_amax_to_scale(amax)
    scale, qdata = nvfp4.nvfp4_quantize(x.contiguous(), per_tensor_scale=outer)
    return qdata, scale.view(*x.shape[:-1], -1), outer


def assert_equal(ours: Operand, others) -> None:
    qdata, scale, outer = others
    assert_bitwise_equal(ours.global_scale.flatten(), outer.flatten(), "tensor scale")
    # Square blocks have the scale of each of their rows.
    rows = ours.scale.contiguous().view(torch.uint8).repeat_interleave(ours.format.block[0], -2)
    assert_bitwise_equal(rows, scale.view(torch.uint8), "scale")
    assert_bitwise_equal(ours.qdata, qdata, "qdata")


@nvfp4_formats
@nvfp4_shapes
def test_nvfp4_is_torchaos(shape, fmt):
    """Square blocks too, whose rows and columns all have the block's amax, and so its scale in blocks of one row."""
    x = nvfp4_input(shape)
    copies = ops.quantize(x, fmt, columnwise=True, tensor_amax=NVFP4_AMAX, backend="reference")
    for ours, values in ((copies.rowwise, x), (copies.columnwise, x.mT)):
        assert_equal(ours, torchaos(values, NVFP4_AMAX))
        assert ours.global_scale == 2.0**-4


@nvfp4_shapes
def test_nvfp4_of_the_transform_is_torchaos(shape):
    """torchao's matrix of the transform, multiplied in fp64 and rounded to bf16 once, as exact sums are in fp32."""
    utils = pytest.importorskip("torchao.prototype.moe_training.nvfp4_training.hadamard_utils")
    matrix = utils.get_rht_matrix(DEFAULT_SIGNS, torch.device("cpu"), torch.bfloat16, 16)
    x = nvfp4_input(shape) / 16
    transformed = (x.mT.reshape(-1, 16).double() @ matrix.double()).view(shape[1], shape[0]).bfloat16()
    assert transformed.abs().unflatten(1, (-1, 16)).amax(-1).min() > 6 * 2.0**-10
    options = {"hadamard": True, "tensor_amax": (NVFP4_AMAX, NVFP4_AMAX), "backend": "reference"}
    ours = ops.quantize(x, NVFP4_1X16, rowwise=False, columnwise=True, **options).columnwise
    assert_equal(ours, torchaos(transformed, NVFP4_AMAX))
