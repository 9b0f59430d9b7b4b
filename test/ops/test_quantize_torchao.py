"""ops.quantize is bitwise identical to torchao's references, in eager PyTorch, and to TransformerEngine's formula.

In NVFP4 torchao divides by 6 and by the tensor scale where ours multiplies, as TransformerEngine does, and raises a
block scale below 2^-6 to it: equal where that is exact, with bf16 values and a tensor scale that is a power of two.
TransformerEngine's is written down here (`reference_nvfp4.py` of its custom recipes).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from grouped_copies import int32
from quantize_cases import LARGEST, nvfp4_input

from torchao_blockwise import ops
from torchao_blockwise.formats import DEFAULT_SIGNS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, shape_id

FLT_MAX = torch.finfo(torch.float32).max
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


def transformer_engines(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by TransformerEngine's formula; amax of what broadcasts to blocks."""
    x = x.float().unflatten(-1, (-1, 16))
    encode = (torch.tensor(448.0 * 6.0) / amax).clamp(max=FLT_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    scale = x.abs().amax(-1) * (encode * torch.tensor(6.0).reciprocal())
    scale = scale.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    by = (1.0 / (scale.float() * (1.0 / encode))).clamp(max=FLT_MAX)
    scaled = (x * by[..., None]).clamp(-6.0, 6.0).flatten(-2)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    # To the nearest, of two the one with the even code.
    distance = (scaled.double().abs()[..., None] - grid).abs() + torch.tensor([0.0, 2.0**-30] * 4)
    codes = distance.argmin(-1) + 8 * torch.signbit(scaled)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), scale, amax / 2688.0


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


# --- groups and experts -----------------------------------------------------------------------------------------------

# Whole chunks, so that columnwise copies have no zeros between groups; one group is empty.
ENDS = [48, 48, 80, 160]
SIZES = [end - start for start, end in itertools.pairwise([0, *ENDS])]
# Of other magnitudes each.
FACTORS = 4.0 ** torch.arange(4)
OF_ROWS = FACTORS.repeat_interleave(torch.tensor(SIZES))[:, None]


def tokens(exact: bool) -> torch.Tensor:
    """Groups [T, 80] in which torchao's arithmetic is exact, or any values; each with its own amax."""
    x = nvfp4_input((160, 80)).float() if exact else random_tensor(160, 80, dtype=torch.float32)
    if exact:
        starts = [end - size for end, size in zip(ENDS, SIZES) if size]
        # 2688 · 2^-4: the tensor scale is a power of two.
        x[starts, 5] = LARGEST
    return (x * OF_ROWS).bfloat16()


def own_scales(x: torch.Tensor, fmt=NVFP4_1X16, **options):
    return ops.quantize(x, fmt, scale_per_group=True, backend="reference", **options)


def parts(x: torch.Tensor) -> list[tuple[Operand, torch.Tensor]]:
    """(copy, the values in its order) of each group that has tokens, its rowwise and its columnwise one."""
    (rows, columns), found, name = own_scales(x, groups=int32(ENDS), columnwise=True), [], NVFP4_1X16.name
    for g, (start, end) in enumerate(itertools.pairwise([0, *ENDS])):
        if start < end:
            of_rows = Operand(rows.qdata[start:end], rows.scale[start:end], rows.global_scale[g], name)
            along = columns.qdata[:, start // 2 : end // 2], columns.scale[:, start // 16 : end // 16]
            found += [(of_rows, x[start:end]), (Operand(*along, columns.global_scale[g], name), x[start:end].mT)]
    return found


@pytest.mark.parametrize("exact", (True, False), ids=("exact", "any values"))
def test_groups_are_transformer_engines(exact):
    for ours, x in parts(tokens(exact)):
        assert_equal(ours, transformer_engines(x, x.abs().amax().float()))


def test_groups_are_torchaos_where_its_arithmetic_is_exact():
    """By an outer scale a row, that of its group: in one call for all."""
    x = tokens(exact=True)
    made = own_scales(x, groups=int32(ENDS)).rowwise
    assert_bitwise_equal(made.global_scale[[0, 2, 3]], 2.0**-4 * FACTORS[[0, 2, 3]])
    of_rows = made.global_scale.repeat_interleave(torch.tensor(SIZES))[:, None]
    assert_equal(made._replace(global_scale=of_rows), torchaos(x, LARGEST * OF_ROWS))


@nvfp4_formats
def test_experts_are_torchaos_with_an_outer_scale_each(fmt):
    w = torch.stack([nvfp4_input((48, 256)) * factor for factor in FACTORS])
    amax = w.abs().amax((1, 2), keepdim=True).float()
    assert (amax.flatten() == LARGEST * FACTORS).all()
    assert_equal(own_scales(w, fmt).rowwise, torchaos(w, amax))


def test_experts_are_transformer_engines():
    w = random_tensor(4, 32, 80) * FACTORS[:, None, None]
    assert_equal(own_scales(w).rowwise, transformer_engines(w, w.abs().amax((1, 2)).float()[:, None, None]))
