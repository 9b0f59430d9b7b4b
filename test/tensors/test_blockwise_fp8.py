"""BlockwiseFP8Tensor: payload and scales of the format, transposed views, power-of-two scales, what it prints."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import weight
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, ops
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("any_scale", "pow2"))
@pytest.mark.parametrize("shape", ((256, 384), (3, 130, 70), (1, 1)), ids=str)
def test_from_hp_is_quantize(shape, power_of_2_scales):
    w = weight(*shape, dtype=torch.bfloat16)
    q = BlockwiseFP8Tensor.from_hp(w, power_of_2_scales=power_of_2_scales)
    expected = ops.quantize(w, FP8_128X128, power_of_2_scales=power_of_2_scales).rowwise
    assert_bitwise_equal(q.qdata, expected.qdata)
    assert_bitwise_equal(q.scale, expected.scale)
    assert_bitwise_equal(q.dequantize(), ops.dequantize(expected, dtype=torch.bfloat16))


def test_copied_in_values_keep_power_of_2_scales():
    q = BlockwiseFP8Tensor.from_hp(weight(128, 128), power_of_2_scales=True)
    for same in (q, q.clone(), q.view(1, 128, 128)[0], q.to(torch.bfloat16), q.t()):
        same.copy_(weight(128, 128, seed=3))
        assert (same.scale.log2() % 1 == 0).all() and same.power_of_2_scales


def test_error_of_a_weight_is_that_of_e4m3():
    """An element of a block keeps 4 significant bits: at most 2^-4 of itself, or half the least step of the block."""
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    q = BlockwiseFP8Tensor.from_hp(w)
    assert relative_error(q.dequantize(), w) < 0.03
    step = q.scale.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-9
    assert ((q.dequantize() - w).abs() <= torch.maximum(w.abs() * 2.0**-4, step / 2) * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", ((256, 384), (130, 70), (2, 3, 256, 128)), ids=str)
def test_transposes_are_views_and_exact(shape):
    q = BlockwiseFP8Tensor.from_hp(weight(*shape))
    views = [q.mT, q.transpose(-1, -2)] + ([q.t(), q.T, q.permute(1, 0)] if q.dim() == 2 else [])
    for t in views:
        assert t.shape == q.mT.shape and t.stride() == q.qdata.mT.stride()
        assert t.qdata.data_ptr() == q.qdata.data_ptr()
        assert_bitwise_equal(t.dequantize(), q.dequantize().mT.contiguous())
        qdata, scale = t.columnwise()
        assert_bitwise_equal(qdata, q.qdata)
        assert_bitwise_equal(scale, q.scale)
        assert torch.equal(t.mT, q)


def test_transposes_of_leading_dims_are_refused():
    q = BlockwiseFP8Tensor.from_hp(weight(2, 128, 128))
    for transpose in (lambda: q.transpose(0, 1), lambda: q.transpose(0, 2), lambda: q.permute(1, 2, 0)):
        with pytest.raises(NotImplementedError, match="only the last two dims can be swapped, got"):
            transpose()


def test_bytes_at_rest():
    """1 byte an element and 4 a block."""
    assert BlockwiseFP8Tensor.from_hp(weight(256, 384)).nbytes == 256 * 384 + 4 * 6
    assert BlockwiseFP8Tensor.from_hp(weight(129, 1)).nbytes == 129 + 4 * 2
    assert BlockwiseFP8Tensor.from_hp(weight(0, 128)).nbytes == 0


def test_prints():
    q = BlockwiseFP8Tensor.from_hp(weight(256, 384, dtype=torch.bfloat16))
    assert_expected_inline(
        repr(q),
        """BlockwiseFP8Tensor(shape=(256, 384), dtype=torch.bfloat16, device='cpu', blocks=128x128, bytes=98328)""",
    )
    assert_expected_inline(
        str(nn.Parameter(q.view(2, 128, 384)[1])),
        """BlockwiseFP8Tensor(shape=(128, 384), dtype=torch.bfloat16, device='cpu', blocks=128x128, bytes=49164, requires_grad=True)""",  # noqa: E501
    )


def test_messages():
    with pytest.raises(NotImplementedError) as inexact:
        BlockwiseFP8Tensor.from_hp(weight(128, 128)).add(1)
    assert_expected_inline(
        str(inexact.value),
        """aten.add.Tensor: not exact on quantized data (in BlockwiseFP8Tensor), so it is not done; for GEMMs call torch.nn.functional.linear (or nn.Linear; grouped_mm for experts, in transformers model.set_experts_implementation("grouped_mm")), else .dequantize() first; to train it, step torchao_blockwise.distributed.MasterWeightOptimizer(torch.optim.AdamW, model, lr=...), or keep high-precision weights (master_weights=True)""",  # noqa: E501
    )
