"""Swizzled scales: each byte where the cuBLAS manual and torchao put it."""

from __future__ import annotations

import pytest
import scaled_products
import torch
from grouped_products import ROUTINGS

from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.testing import shape_id

kernels = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_blackwell")
formats = pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda fmt: fmt.name)
# [rows, columns] of elements: one, a tile of 128 × 64, ragged in each dim, several programs' tiles side by side.
SHAPES = ((1, 1), (256, 64), (40, 48), (130, 144), (300, 270), (129, 2064))


def operand(fmt, *shape: int) -> Operand:
    """Of payload that nobody reads, and scales of any bytes but zero, that differ from their neighbors."""
    scale = torch.empty(fmt.scale_shape(*shape), dtype=torch.uint8)
    scale.copy_((torch.arange(scale.numel()) * 37 % 255 + 1).view(scale.shape))
    payload = torch.empty(fmt.qdata_shape(*shape), dtype=torch.uint8)
    return Operand(payload, scale.view(fmt.scale_dtype), torch.ones(()), fmt.name)


def row_scales(x: Operand) -> torch.Tensor:
    """Bytes, a scale for each row of each block: [.., rows, columns]."""
    rows = torch.arange(x.qdata.shape[-2]) // x.format.block[0]
    return x.scale.view(torch.uint8)[..., rows, :]


def placed(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of a matrix of scales where the manual's formula puts them."""
    rows, columns = scales.shape
    out = torch.zeros(scaled_products.round_up(rows, 128) * scaled_products.round_up(columns, 4), dtype=torch.uint8)
    out[scaled_products.swizzled_at(rows, columns)] = scales
    return out


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_each_scale_lies_where_the_manual_says(shape, fmt):
    x = operand(fmt, *shape)
    swizzled = kernels.swizzled_scales(x)
    assert swizzled.dtype is torch.float8_e4m3fn and swizzled.is_contiguous()
    assert torch.equal(swizzled.view(torch.uint8), placed(row_scales(x)))


def test_the_order_is_torchaos():
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    x = operand(NVFP4_16X16, 300, 270)
    assert torch.equal(kernels.swizzled_scales(x).view(torch.uint8), to_blocked(row_scales(x)))


@formats
def test_each_matrix_has_tiles_of_its_own(fmt):
    x = operand(fmt, 3, 140, 80)
    swizzled = kernels.swizzled_scales(x).view(torch.uint8)
    assert swizzled.shape == (3, 256 * 8)
    for one, scales in zip(swizzled, row_scales(x)):
        assert torch.equal(one, placed(scales))


def test_a_grid_that_is_not_contiguous():
    x = operand(NVFP4_1X16, 130, 80)
    wide = torch.zeros(130, 9, dtype=torch.uint8)
    wide[:, 2:7] = x.scale.view(torch.uint8)
    strided = x._replace(scale=wide[:, 2:7].view(x.scale.dtype))
    assert torch.equal(kernels.swizzled_scales(strided).view(torch.uint8), placed(row_scales(x)))


@pytest.mark.parametrize("routing", [routing for routing in ROUTINGS if routing != "no_tokens"])
def test_each_group_has_tiles_of_its_own(routing):
    sizes, tail = ROUTINGS[routing]
    tokens, ends = sum(sizes) + tail, torch.tensor(sizes).cumsum(0).int()
    x = operand(NVFP4_1X16, tokens, 200)
    swizzled, clamped = kernels.swizzled_scales_of_groups(x, ends)
    assert swizzled.shape == (padded_tokens(tokens, len(sizes), 128), 16) and swizzled.is_contiguous()
    flat, first = swizzled.view(torch.uint8).flatten(), 0
    for scales in x.scale.view(torch.uint8)[: sum(sizes)].split(sizes):
        expected = placed(scales)
        assert torch.equal(flat[first : first + expected.numel()], expected)
        first += expected.numel()
    assert not flat[first:].any()
    assert torch.equal(clamped, ends)


def test_ends_lead_out_of_no_memory(machine):
    machine.reads_no_group_ends()
    x, ends = operand(NVFP4_1X16, 150, 64), torch.tensor([-3, 40, 20, 999], dtype=torch.int32)
    swizzled, clamped = kernels.swizzled_scales_of_groups(x, ends)
    assert clamped.tolist() == [0, 40, 40, 150]
    expected = kernels.swizzled_scales_of_groups(x, clamped)[0]
    assert torch.equal(swizzled.view(torch.uint8), expected.view(torch.uint8))
