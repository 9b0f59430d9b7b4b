"""Views of quantized tensors: slices, splits and reshapes that are exact, and refusals of those that are not."""

from __future__ import annotations

import pytest
import torch
from helpers import QUANTIZERS, every_kind, weight

from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.testing import assert_bitwise_equal


def slice_cases(fmt):
    rows, columns = fmt.block
    return [
        ((slice(rows, None),), "tail"), ((slice(0, rows),), "first"), ((slice(2 * rows, 3 * rows),), "middle"),
        ((slice(None), slice(columns, 2 * columns)), "columns"), ((slice(rows, rows),), "empty"),
        ((slice(-rows if 300 % rows == 0 else rows, None), slice(0, columns)), "both"), ((slice(None),), "all"),
        ((slice(300 // rows * rows, 9999),), "ragged"), ((..., slice(0, columns)), "ellipsis"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("case", range(9), ids=[name for _, name in slice_cases(FP8_128X128)])
def test_slices_on_block_borders_are_exact(kind, case):
    q = QUANTIZERS[kind](weight(300, 272))
    index = slice_cases(q.fmt)[case][0]
    part = q[index]
    assert type(part) is type(q)
    assert_bitwise_equal(part.dequantize(), q.dequantize()[index].contiguous())


OFF_BORDERS = [
    ("fp8", (slice(1, None),), r"slice: \[1:300\] of dim 0 \(size 300\) cuts blocks of 128; slice on multiples of 128"),
    ("fp8", (slice(None), slice(0, 16)), r"of dim 1 \(size 272\) cuts blocks of 128"),
    ("nvfp4", (slice(8, 24),), r"cuts blocks of 16; slice on multiples of 16, or dequantize\(\) first"),
    ("nvfp4_1x16", (slice(None), slice(0, 17)), r"cuts blocks of 16"),
    ("fp8", (slice(None, None, 2),), r"steps other than 1 cut blocks, got step=2; dequantize\(\) first"),
    ("fp8", (0,), r"select: dim 0 would cut blocks; slice at block boundaries, or dequantize\(\) first"),
    ("nvfp4", (slice(None), 3), r"select: dim 1 would cut blocks"),
]


@pytest.mark.parametrize(("kind", "index", "message"), OFF_BORDERS)
def test_slices_off_block_borders_are_refused(kind, index, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        QUANTIZERS[kind](weight(300, 272))[index]


@every_kind
def test_split_chunk_narrow_select_unbind(from_hp):
    q = from_hp(weight(4, 256, 128))
    expected = q.dequantize()
    pieces = {
        "split": (q.split(128, dim=1), expected.split(128, dim=1)),
        "split_sizes": (q.split([1, 3]), expected.split([1, 3])),
        "split_rows": (q.split([128, 128], dim=-2), expected.split([128, 128], dim=-2)),
        "chunk": (q.chunk(2, dim=1), expected.chunk(2, dim=1)),
        "narrow": ((q.narrow(1, 128, 128),), (expected.narrow(1, 128, 128),)),
        "select": ((q[2], q.select(0, -1)), (expected[2], expected[-1])),
        "unbind": (q.unbind(0), expected.unbind(0)),
    }
    for name, (parts, wanted) in pieces.items():
        assert len(parts) == len(wanted), name
        for part, want in zip(parts, wanted):
            assert_bitwise_equal(part.dequantize(), want.contiguous(), name)


@every_kind
@pytest.mark.parametrize(
    ("shape", "new"),
    [((2, 128, 64), (256, 64)), ((256, 64), (2, 128, 64)), ((2, 3, 130, 64), (6, 130, 64)), ((130, 64), (1, 130, 64)),
     ((4, 128, 64), (-1, 64)), ((4, 128, 64), (2, -1, 64)), ((130, 71), (130, 71))],
    ids=str,
)  # fmt: skip
def test_views_are_exact(from_hp, shape, new):
    q = from_hp(weight(*shape))
    for viewed in (q.view(new), q.reshape(new)):
        assert type(viewed) is type(q)
        assert_bitwise_equal(viewed.dequantize(), q.dequantize().view(new))


@every_kind
def test_views_that_cut_blocks_are_refused(from_hp):
    q, experts = from_hp(weight(256, 64)), from_hp(weight(2, 100, 64))
    q.layer = experts.layer = "up"
    for view in (*(lambda new=new: q.view(new) for new in ((-1,), (64, 256), (256, 32, 2))), experts.flatten):
        with pytest.raises(ValueError, match=r"view: up .* would cut blocks of .*; keep the last dim, and rows in"):
            view()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_part_of_columns_is_known_to_lie_apart(kind):
    """Code that sends its bytes asks for a contiguous copy first."""
    q = QUANTIZERS[kind](weight(32, 512))
    part = q[:, :256]
    assert q.is_contiguous() and not part.is_contiguous()
    copy = part.contiguous()
    assert copy.is_contiguous() and copy.qdata.is_contiguous()
    assert_bitwise_equal(copy.qdata, q.qdata[:, : copy.qdata.shape[1]].contiguous())


@pytest.mark.parametrize("shape", ((256, 384), (130, 70), (2, 3, 256, 128)), ids=str)
def test_transposes_are_views_and_exact(shape):
    q = QUANTIZERS["fp8"](weight(*shape))
    views = [q.mT, q.transpose(-1, -2)] + ([q.t(), q.T, q.permute(1, 0)] if q.dim() == 2 else [])
    for t in views:
        assert t.shape == q.mT.shape and t.stride() == q.qdata.mT.stride()
        assert t.qdata.data_ptr() == q.qdata.data_ptr()
        assert_bitwise_equal(t.dequantize(), q.dequantize().mT.contiguous())
        qdata, scale = t.columnwise()
        assert_bitwise_equal(qdata, q.qdata)
        assert_bitwise_equal(scale, q.scale)
        assert torch.equal(t.mT, q)


OTHER_TRANSPOSES = {
    "leading": ("fp8", lambda q: q.transpose(0, 1), "only the last two dims can be swapped, got"),
    "all": ("fp8", lambda q: q.permute(1, 2, 0), "only the last two dims can be swapped, got"),
    "packed": ("nvfp4", lambda q: q[0].mT, "packs two elements in a byte"),
    "packed_rows": ("nvfp4_1x16", lambda q: q[0].t(), "packs two elements in a byte"),
    "columnwise": ("nvfp4_1x16", lambda q: q.columnwise(), "got 1x16 .*, whose transpose needs other scales"),
}


@pytest.mark.parametrize(("kind", "transpose", "message"), OTHER_TRANSPOSES.values(), ids=OTHER_TRANSPOSES)
def test_other_transposes_are_refused(kind, transpose, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        transpose(QUANTIZERS[kind](weight(2, 128, 128)))


@pytest.mark.parametrize("kind", ("nvfp4", "nvfp4_1x16"))
@pytest.mark.parametrize("columns", (1, 15, 17, 33))
def test_odd_columns(kind, columns):
    """The last byte holds one element; slices and views keep count of them."""
    w = weight(2, 32, columns)
    q = QUANTIZERS[kind](w)
    assert q.qdata.shape[-1] == (columns + 1) // 2 and q.shape[-1] == columns
    decoded = q.dequantize()
    assert_bitwise_equal(q.view(64, columns).dequantize(), decoded.view(64, columns))
    assert_bitwise_equal(q[..., columns // 16 * 16 :].dequantize(), decoded[..., columns // 16 * 16 :].contiguous())
    assert_bitwise_equal(q[1].dequantize(), decoded[1])
    if kind == "nvfp4":
        assert_bitwise_equal(q.columnwise()[0], QUANTIZERS[kind](w.mT).qdata)
