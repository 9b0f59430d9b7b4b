"""Tensor scales of groups and experts are those of torchao and of TransformerEngine, and so are the bits under them.

torchao quantizes experts' weights with an outer scale each, and any rows with an outer scale a row. It divides by 6 and
by the tensor scale where ours multiplies, as TransformerEngine does: equal where that is exact, one step off at most
elsewhere. TransformerEngine's is written down here (`reference_nvfp4.py` of its custom recipes).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from grouped_copies import int32
from quantize_cases import LARGEST, nvfp4_input

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
FLT_MAX = torch.finfo(torch.float32).max
# Whole chunks, so that columnwise copies have no zeros between groups; one group is empty.
ENDS = [48, 48, 80, 160]
SIZES = [end - start for start, end in itertools.pairwise([0, *ENDS])]
# Of other magnitudes each.
FACTORS = 4.0 ** torch.arange(4)
OF_ROWS = FACTORS.repeat_interleave(torch.tensor(SIZES))[:, None]


def torchaos(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(payload, block scales, tensor scales), with tensor scales of these amaxes, which are of one shape but for 1s."""
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


def tokens(exact: bool) -> torch.Tensor:
    """Groups [T, 80] in which torchao's arithmetic is exact, or any values; each with its own amax."""
    x = nvfp4_input((160, 80)).float() if exact else random_tensor(160, 80, dtype=torch.float32)
    if exact:
        starts = [end - size for end, size in zip(ENDS, SIZES) if size]
        # 2688 · 2^-4: the tensor scale is a power of two.
        x[starts, 5] = LARGEST
    return (x * OF_ROWS).bfloat16()


def grouped(x: torch.Tensor):
    options = {"columnwise": True, "scale_per_group": True, "backend": "reference"}
    return ops.quantize(x, NVFP4_1X16, groups=int32(ENDS), **options)


def parts(x: torch.Tensor) -> list[tuple[Operand, torch.Tensor]]:
    """(copy, the values in its order) of each group that has tokens, its rowwise and its columnwise one."""
    made, found = grouped(x), []
    for g, (start, end) in enumerate(itertools.pairwise([0, *ENDS])):
        if start < end:
            (rows, columns), name = made, NVFP4_1X16.name
            of_rows = Operand(rows.qdata[start:end], rows.scale[start:end], rows.global_scale[g], name)
            along = columns.qdata[:, start // 2 : end // 2], columns.scale[:, start // 16 : end // 16]
            found += [(of_rows, x[start:end]), (Operand(*along, columns.global_scale[g], name), x[start:end].mT)]
    return found


def assert_equal(ours: Operand, others) -> None:
    qdata, scale, outer = others
    assert_bitwise_equal(ours.global_scale.flatten(), outer.flatten(), "tensor scale")
    assert_bitwise_equal(ours.scale.contiguous().view(torch.uint8), scale.view(torch.uint8), "scale")
    assert_bitwise_equal(ours.qdata, qdata, "qdata")


def values(qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Before the tensor scale."""
    return ops.dequantize(Operand(qdata.contiguous(), scale.contiguous(), None, NVFP4_1X16.name))


@pytest.mark.parametrize("exact", (True, False), ids=("exact", "any values"))
def test_groups_are_transformer_engines(exact):
    for ours, x in parts(tokens(exact)):
        assert_equal(ours, transformer_engines(x, x.abs().amax().float()))


def test_groups_are_torchaos_where_its_arithmetic_is_exact():
    """By an outer scale a row, that of its group: in one call for all."""
    x = tokens(exact=True)
    made = grouped(x).rowwise
    assert_bitwise_equal(made.global_scale[[0, 2, 3]], 2.0**-4 * FACTORS[[0, 2, 3]])
    of_rows = made.global_scale.repeat_interleave(torch.tensor(SIZES))[:, None]
    assert_equal(made._replace(global_scale=of_rows), torchaos(x, LARGEST * OF_ROWS))


def test_groups_are_one_step_from_torchaos():
    """Tensor scales are equal; a block scale differs by a code at most, and so does an element under equal ones."""
    differ = compared = 0
    for ours, x in parts(tokens(exact=False)):
        qdata, scale, outer = torchaos(x, x.abs().amax().float())
        assert_bitwise_equal(ours.global_scale, outer)
        mine, theirs = (s.contiguous().view(torch.uint8).int() for s in (ours.scale, scale))
        # torchao stores no scale below 2^-6, its code 8.
        assert ((mine - theirs).abs()[mine >= 8] <= 1).all()
        same = (mine == theirs).repeat_interleave(16, 1)
        distance = (values(ours.qdata, ours.scale) - values(qdata, scale)).abs()
        step = torch.maximum(values(ours.qdata, ours.scale).abs(), values(qdata, scale).abs()) / 2
        assert (distance <= torch.maximum(step, ours.scale.float().repeat_interleave(16, 1) / 2))[same].all()
        differ, compared = differ + int((distance[same] > 0).sum() + (mine != theirs).sum()), compared + x.numel()
    assert differ < 0.01 * compared


@pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
def test_experts_are_torchaos_with_an_outer_scale_each(fmt):
    """Square blocks too, whose rows all have the block's amax."""
    w = torch.stack([nvfp4_input((48, 256)) * factor for factor in FACTORS])
    amax = w.abs().amax((1, 2), keepdim=True).float()
    assert (amax.flatten() == LARGEST * FACTORS).all()
    ours = ops.quantize(w, fmt, scale_per_group=True, backend="reference").rowwise
    rows = ours.scale.view(torch.uint8).repeat_interleave(fmt.block[0], 1).view(torch.float8_e4m3fn)
    assert_equal(ours._replace(scale=rows), torchaos(w, amax))


def test_experts_are_transformer_engines():
    w = random_tensor(4, 32, 80) * FACTORS[:, None, None]
    ours = ops.quantize(w, NVFP4_1X16, scale_per_group=True, backend="reference").rowwise
    assert_equal(ours, transformer_engines(w, w.abs().amax((1, 2)).float()[:, None, None]))


def test_products_are_torchaos_grouped_ones():
    """Its emulation decodes to bf16, which is exact, and knows no tensor scales: those of a group come after."""
    emulated = pytest.importorskip("torchao.prototype.moe_training.nvfp4_grouped_mm")
    x = tokens(exact=False)
    w = random_tensor(4, 32, 80, seed=1) * FACTORS.flip(0)[:, None, None]
    a, b = grouped(x).rowwise, ops.quantize(w, NVFP4_1X16, scale_per_group=True, backend="reference").rowwise
    product = emulated._emulated_nvfp4_scaled_grouped_mm_2d_3d(a.qdata, a.scale, b.qdata, b.scale, int32(ENDS))
    scales = (a.global_scale * b.global_scale).repeat_interleave(torch.tensor(SIZES))[:, None]
    got = ops.grouped_matmul(a, b, int32(ENDS), out_dtype=torch.float32, backend="reference")
    wanted = product.float() * scales
    torch.testing.assert_close(got / scales, wanted / scales, rtol=2.0**-8, atol=2.0**-8)
