"""Quantized tensors: their values and bytes, copies, moves, casts, views, and refusals that name a remedy."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import QUANTIZERS, every_kind, weight
from quantized_tensors import CONFIG, assert_same, shapes, with_config
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, ops
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.testing import assert_bitwise_equal


@every_kind
@shapes
def test_from_hp_is_quantize(from_hp, shape):
    """Whatever the strides of the input; shape and dtype are those of the high-precision tensor."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w = weight(*shape, dtype=dtype)
        padded = torch.full((*shape[:-1], shape[-1] + 5), float("nan"), dtype=dtype)
        padded[..., : shape[-1]] = w
        q = from_hp(w)
        for other in (w.mT.contiguous().mT, padded[..., : shape[-1]]):
            assert_same(from_hp(other), q)
        power_of_2_scales = getattr(q, "power_of_2_scales", False)
        expected = ops.quantize(w, q.fmt, power_of_2_scales=power_of_2_scales).rowwise
        for name, part in q.parts().items():
            assert_bitwise_equal(part, getattr(expected, name), name)
        assert (q.shape, q.dtype, q.device.type) == (torch.Size(shape), dtype, "cpu")
        decoded = ops.dequantize(expected, dtype=dtype, columns=shape[-1])
        assert_bitwise_equal(q.dequantize(), decoded)
        assert q.dequantize(torch.float64).dtype == torch.float64
        assert q.nbytes == q.fmt.nbytes(*shape)


def test_block_sizes():
    assert NVFP4Tensor.from_hp(weight(16, 16), block_size=[1, 16]).block_size == (1, 16)
    for block_size in ((8, 16), (16, 1), (16,), 16):
        with pytest.raises(ValueError, match=r"block_size must be \(16, 16\) or \(1, 16\), got "):
            NVFP4Tensor.from_hp(weight(16, 16), block_size=block_size)


def test_copied_in_values_keep_power_of_2_scales():
    q = BlockwiseFP8Tensor.from_hp(weight(128, 128), power_of_2_scales=True)
    for same in (q, q.clone(), q.view(1, 128, 128)[0], q.to(torch.bfloat16), q.t()):
        same.copy_(weight(128, 128, seed=3))
        assert (same.scale.log2() % 1 == 0).all() and same.power_of_2_scales


def test_prints():
    assert_expected_inline(
        repr(BlockwiseFP8Tensor.from_hp(weight(256, 384, dtype=torch.bfloat16))),
        """BlockwiseFP8Tensor(shape=(256, 384), dtype=torch.bfloat16, device='cpu', blocks=128x128, bytes=98328)""",
    )
    assert_expected_inline(
        str(nn.Parameter(NVFP4Tensor.from_hp(weight(64, 33), block_size=(1, 16)))),
        """NVFP4Tensor(shape=(64, 33), dtype=torch.float32, device='cpu', blocks=1x16, bytes=1284, requires_grad=True)""",  # noqa: E501
    )
    with pytest.raises(NotImplementedError) as inexact:
        BlockwiseFP8Tensor.from_hp(weight(128, 128)).add(1)
    assert_expected_inline(
        str(inexact.value),
        """aten.add.Tensor: not exact on quantized data (BlockwiseFP8Tensor), so it is not supported; for a GEMM, call torch.nn.functional.linear (or nn.Linear; grouped_mm or bmm for experts, in transformers model.set_experts_implementation("grouped_mm"); for a DTensor, nn.Linear or one of these with x.to_local() and weight.to_local()), otherwise call .dequantize() first; to train the weight, use torchao_blockwise.distributed.MasterWeightOptimizer(torch.optim.AdamW, model, lr=...), or keep high-precision weights (master_weights=True)""",  # noqa: E501
    )


@every_kind
def test_other_dtypes_are_refused(from_hp):
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"dtype must be bfloat16, float16 or float32, got torch\..*dequantize\(\)"):
            from_hp(weight(64, 48)).to(dtype)


@every_kind
@pytest.mark.parametrize("shape", ((256, 384), (2, 130, 71)), ids=str)
def test_meta(from_hp, shape):
    with torch.device("meta"):
        q = with_config(from_hp, torch.empty(shape))
    real = with_config(from_hp, weight(*shape))
    assert [t.shape for t in q.parts().values()] == [t.shape for t in real.parts().values()]
    empty = torch.empty_like(q, device="cpu")
    empty.copy_(real)
    assert_same(empty, real)
    layer = nn.ParameterList([nn.Parameter(q)]).to_empty(device="cpu")
    assert layer[0].qdata.device.type == "cpu" and type(layer[0]) is type(real)


@every_kind
def test_likes(from_hp):
    q = nn.Parameter(from_hp(weight(64, 48, dtype=torch.bfloat16)))
    assert type(torch.empty_like(q)) is type(q.data) and torch.empty_like(q).qdata.shape == q.qdata.shape
    assert torch.empty_like(q, dtype=torch.float32).dtype == torch.float32
    plain = (torch.zeros_like(q), torch.ones_like(q), torch.full_like(q, 2.0), q.new_zeros(3), q.new_empty(2, 2))
    for value, x in zip((0, 1, 2, 0, None), plain):
        assert type(x) is torch.Tensor and x.dtype == torch.bfloat16
        assert value is None or (x == value).all()
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32


@every_kind
def test_equal_compares_bits_kinds_shapes_and_blocks(from_hp):
    w = weight(64, 48)
    w[0, 0] = -0.0
    q = from_hp(w)
    assert torch.equal(q, q.clone())
    for other in (w, from_hp(w * 2), from_hp(w[:48])):
        assert not torch.equal(q, other) and not torch.equal(other, q)
    # Of a row of zeros all blocks of NVFP4 have the same bytes, also without the last column.
    zeros = from_hp(torch.zeros(1, 16))
    assert not torch.equal(zeros, from_hp(torch.zeros(1, 15)))
    for other in (make(torch.zeros(1, 16)) for make in QUANTIZERS.values()):
        assert zeros.fmt is other.fmt or not torch.equal(zeros, other)
    flipped = q.clone()
    flipped.qdata.view(torch.uint8)[0, 0] ^= 0x80
    assert not torch.equal(q, flipped)


@every_kind
def test_copy_from_plain_same_kind_and_wrong(from_hp):
    q, w = from_hp(weight(64, 48)), weight(64, 48, seed=1)
    assert q.copy_(w) is q
    assert_same(q, from_hp(w))
    q.copy_(from_hp(w * 3))
    assert_same(q, from_hp(w * 3))
    q.copy_(MasterWeightTensor(w, CONFIG))
    assert_same(q, from_hp(w))
    with pytest.raises(ValueError, match=r"copy_: the target has shape \[64, 48\], the source \[1, 48\]"):
        q.copy_(w[:1])
    with pytest.raises(NotImplementedError, match=r"target a plain tensor; copy from source.dequantize\(\)"):
        torch.empty(64, 48).copy_(q)
    with pytest.raises(TypeError, match="must be bfloat16, float16 or float32"):
        q.copy_(w.int())
    other = next(f(w) for f in QUANTIZERS.values() if f(w).fmt is not q.fmt)
    with pytest.raises(
        ValueError, match=f"the target is {q.fmt.name}, the source {other.fmt.name}; copy from source.deq"
    ):
        q.copy_(other)
    assert_same(q, from_hp(w))


@every_kind
def test_assigning_data_takes_over_the_values(from_hp):
    w = weight(64, 48, seed=1)
    for source in (w, from_hp(w)):
        parameter = nn.Parameter(from_hp(weight(64, 48)))
        parameter.data = source
        assert torch.equal(parameter, from_hp(w)) and parameter.requires_grad
    with pytest.raises(ValueError, match=r"data: the target has shape \[64, 48\], the source \[48, 64\]"):
        parameter.data = w.t()


INEXACT = {
    "add": lambda q: q + 1,
    "mul_": lambda q: q.mul_(2),
    "sum": lambda q: q.sum(),
    "zero_": lambda q: q.zero_(),
    "normal_": lambda q: nn.init.normal_(q),
    "embedding": lambda q: F.embedding(torch.tensor([1]), q),
    "cat": lambda q: torch.cat([q, q]),
    "setitem": lambda q: q.__setitem__(slice(0, 128), 1.0),
    "index": lambda q: q[torch.tensor([0, 1])],
    "expand": lambda q: q.expand(2, 256, 384),
    "foreach_add_": lambda q: torch._foreach_add_([q], 1.0),
    "sgd": lambda q: _step(q),
    "mm": lambda q: torch.zeros(3, 384) @ q.dequantize().T.contiguous().mm(q),
    "mm_T": lambda q: torch.zeros(3, 384) @ q.T,
    "bmm": lambda q: torch.bmm(torch.zeros(1, 3, 256), q[None]),
    "addmm": lambda q: torch.addmm(torch.zeros(384), torch.zeros(3, 256), q),
}


def _step(q):
    parameter = nn.Parameter(q)
    parameter.grad = torch.ones(q.shape)
    torch.optim.SGD([parameter], lr=1.0).step()


@every_kind
@pytest.mark.parametrize("op", INEXACT.values(), ids=INEXACT)
def test_what_cannot_be_exact_raises_with_a_remedy(from_hp, op):
    q = from_hp(weight(256, 384))
    before = q.clone()
    with pytest.raises(
        (NotImplementedError, ValueError),
        match=r"dequantize\(\)|F\.linear|functional\.linear|square blo|MasterWeightOptimizer",
    ):
        op(q)
    assert torch.equal(q, before)


# --- views ------------------------------------------------------------------------------------------------------------


def slice_cases(fmt):
    rows, columns = fmt.block
    return [
        ((slice(rows, None),), "tail"), ((slice(0, rows),), "first"), ((slice(2 * rows, 3 * rows),), "middle"),
        ((slice(None), slice(columns, 2 * columns)), "columns"), ((slice(rows, rows),), "empty"),
        ((slice(-rows if 300 % rows == 0 else rows, None), slice(0, columns)), "both"), ((slice(None),), "all"),
        ((slice(300 // rows * rows, 9999),), "ragged"), ((..., slice(0, columns)), "ellipsis"),
        ((..., slice(272 // columns * columns, None)), "odd"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("case", range(10), ids=[name for _, name in slice_cases(FP8_128X128)])
def test_slices_on_block_borders_are_exact(kind, case):
    """The last byte of an odd row in NVFP4 has one element: slices keep count of them."""
    q = QUANTIZERS[kind](weight(300, 273))
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
    sizes = [(-1,), (64, 256), (256, 32, 2)] + [(32, 8, 64)] * (q.fmt.block[0] > 1)
    for view in (*(lambda new=new: q.view(new) for new in sizes), experts.flatten):
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
