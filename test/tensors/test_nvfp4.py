"""NVFP4Tensor: payload, two levels of scales, odd columns, one-row blocks, 4.03 bits a weight."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import weight
from torch import nn

from torchao_blockwise import NVFP4Tensor, ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")

FORMATS = {(16, 16): NVFP4_16X16, (1, 16): NVFP4_1X16}
both_blocks = pytest.mark.parametrize("block_size", FORMATS, ids=("16x16", "1x16"))


@both_blocks
@pytest.mark.parametrize("shape", ((64, 48), (3, 30, 21), (1, 1), (17, 33)), ids=str)
def test_from_hp_is_quantize(shape, block_size):
    w = weight(*shape, dtype=torch.bfloat16)
    q, expected = NVFP4Tensor.from_hp(w, block_size=block_size), ops.quantize(w, FORMATS[block_size]).rowwise
    assert q.block_size == block_size and q.columns == shape[-1]
    for name in ("qdata", "scale", "global_scale"):
        assert_bitwise_equal(getattr(q, name), getattr(expected, name), name)
    assert_bitwise_equal(q.dequantize(), ops.dequantize(expected, dtype=torch.bfloat16, columns=shape[-1]))


def test_block_sizes():
    assert NVFP4Tensor.from_hp(weight(16, 16), block_size=[1, 16]).block_size == (1, 16)
    for block_size in ((8, 16), (16, 1), (16,), (128, 128)):
        with pytest.raises(ValueError, match=r"block_size must be \(16, 16\) or \(1, 16\), got \("):
            NVFP4Tensor.from_hp(weight(16, 16), block_size=block_size)


@both_blocks
@pytest.mark.parametrize("columns", (1, 15, 17, 33))
def test_odd_columns(block_size, columns):
    """The last byte holds one element; slices and views keep count of them."""
    w = weight(2, 32, columns)
    q = NVFP4Tensor.from_hp(w, block_size=block_size)
    assert q.qdata.shape[-1] == (columns + 1) // 2 and q.shape[-1] == columns
    decoded = q.dequantize()
    assert_bitwise_equal(q.view(64, columns).dequantize(), decoded.view(64, columns))
    assert_bitwise_equal(q[..., columns // 16 * 16 :].dequantize(), decoded[..., columns // 16 * 16 :].contiguous())
    assert_bitwise_equal(q[1].dequantize(), decoded[1])
    if block_size == (16, 16):
        qdata, _ = q.columnwise()
        assert_bitwise_equal(qdata, NVFP4Tensor.from_hp(w.mT).qdata)


def test_slices_keep_the_scale_of_the_whole():
    """A part decodes as it did in the whole, not as it would alone."""
    w = torch.cat([torch.full((16, 16), 100.0), torch.full((16, 16), 0.3)])
    q = NVFP4Tensor.from_hp(w)
    assert_bitwise_equal(q[16:].global_scale, q.global_scale)
    assert_bitwise_equal(q[16:].dequantize(), q.dequantize()[16:])
    assert not torch.equal(q[16:], NVFP4Tensor.from_hp(w[16:]))


def test_error_of_a_weight_is_that_of_e2m1():
    """Half the widest step, 2 of 6, of the block's largest magnitude, and the rounding of the scale on top."""
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for block_size, budget in (((16, 16), 0.14), ((1, 16), 0.11)):
        q = NVFP4Tensor.from_hp(w, block_size=block_size)
        assert relative_error(q.dequantize(), w) < budget
        rows, columns = block_size
        blocks = w.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax(dim=(1, 3), keepdim=True)
        bound = (blocks * (1 / 6 + 2.0**-3)).expand(-1, rows, -1, columns).reshape(w.shape)
        assert ((q.dequantize() - w).abs() <= bound).all()


@both_blocks
def test_transposes_are_refused(block_size):
    q = NVFP4Tensor.from_hp(weight(32, 32), block_size=block_size)
    for op in (torch.t, lambda x: x.mT, lambda x: x.T, lambda x: x.transpose(0, 1)):
        with pytest.raises(NotImplementedError, match="packs two elements a byte"):
            op(q)


def test_bytes_at_rest():
    big = NVFP4Tensor.from_hp(torch.zeros(1024, 1024))
    assert big.nbytes == 1024 * 1024 // 2 + 64 * 64 + 4
    assert round(big.nbytes * 8 / big.numel(), 2) == 4.03
    assert NVFP4Tensor.from_hp(weight(17, 17)).nbytes == 17 * 9 + 4 + 4
    assert NVFP4Tensor.from_hp(weight(17, 17), block_size=(1, 16)).nbytes == 17 * 9 + 17 * 2 + 4


def test_prints():
    q = NVFP4Tensor.from_hp(weight(64, 33))
    assert_expected_inline(
        repr(q), """NVFP4Tensor(shape=(64, 33), dtype=torch.float32, device='cpu', blocks=16x16, bytes=1104)"""
    )
    assert_expected_inline(
        str(nn.Parameter(NVFP4Tensor.from_hp(weight(64, 33), block_size=(1, 16)))),
        """NVFP4Tensor(shape=(64, 33), dtype=torch.float32, device='cpu', blocks=1x16, bytes=1284, requires_grad=True)""",  # noqa: E501
    )
