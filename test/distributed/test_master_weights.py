"""Partial cast of sharded masters: bitwise identical to the whole on any ranks, one all-reduce, clear errors."""

import re

import pytest
import torch
from master_weight_checks import CASTS, Weights, check_scales
from shard_cases import framed
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, NVFP4Tensor, _compat
from torchao_blockwise.distributed import (
    cast,
    cast_master_weights,
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
)
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor


# AUTO: Triton's interpreter on a CPU, so that these go through the kernels.
@pytest.mark.parametrize("kind", CASTS)
def test_alone(kind):
    weights = Weights(kind)
    CASTS[kind](weights.model, [w.flatten() for w in weights.hp], [0] * len(weights.hp))
    check_scales(weights)
    for i, (got, want) in enumerate(zip(weights.model, weights.expected())):
        assert_bitwise_equal(got.qdata, want.qdata, f"payload {i}")


def test_masters_that_cut_no_block_are_read_once(monkeypatch):
    """Their payload is written with their amaxes; of NVFP4's, which wait for the tensor's amax, after them."""
    two_reads = []
    monkeypatch.setattr(cast, "partial_cast_op", lambda targets, *args, **_: two_reads.append(len(targets)))
    whole, part = random_tensor(200, 70), random_tensor(200, 70)[:130]
    for kind, reads in (("fp8", [1]), ("nvfp4", [2])):
        of_kind = {"fp8": BlockwiseFP8Tensor, "nvfp4": NVFP4Tensor}[kind]
        weights = [of_kind.from_hp(torch.zeros(200, 70, dtype=torch.bfloat16)) for _ in range(2)]
        CASTS[kind](weights, [whole.flatten(), part.flatten()], [0, 0])
        assert two_reads == reads
        two_reads.clear()


def test_parameters_and_their_masters():
    """Weights that are Parameters, masters that require gradients; tensors keep their identity and memory."""
    weight = nn.Parameter(BlockwiseFP8Tensor.from_hp(torch.zeros(40, 70, dtype=torch.bfloat16)))
    master = nn.Parameter(random_tensor(40, 70).flatten())
    inner = weight.qdata, weight.scale
    places = [t.data_ptr() for t in inner]
    cast_master_weights_to_fp8([weight], [master], [0])
    assert torch.equal(weight, BlockwiseFP8Tensor.from_hp(master.detach().view(40, 70).bfloat16()))
    assert (weight.qdata, weight.scale) == inner and [t.data_ptr() for t in inner] == places
    assert master.grad_fn is None and master.requires_grad


def test_a_change_between_forward_and_backward_is_seen():
    layer = nn.Linear(48, 32, bias=False)
    layer.weight = nn.Parameter(BlockwiseFP8Tensor.from_hp(layer.weight.detach()))
    weight = layer.weight
    tensors = weight, weight.qdata, weight.scale
    versions = [_compat.version_of(t) for t in tensors]
    out = layer(torch.randn(8, 48, requires_grad=True))
    cast_master_weights_to_fp8([weight], [None], [None])
    assert _compat.version_of(weight) > versions[0] and _compat.version_of(weight.scale) > versions[2]
    assert _compat.version_of(weight.qdata) == versions[1], "nothing of it was written"
    cast_master_weights_to_fp8([weight], [torch.ones(1536)], [0])
    assert all(_compat.version_of(t) > version for t, version in zip(tensors, versions))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_made_under_inference_mode():
    with torch.inference_mode():
        weight = NVFP4Tensor.from_hp(torch.zeros(16, 16))
        cast_master_weights_to_nvfp4([weight], [torch.ones(256)], [0])
        assert weight.dequantize().eq(1).all()


def test_shards_alone_leave_freed_payload_alone():
    """FSDP frees the whole payload between uses."""
    weight = NVFP4Tensor.from_hp(torch.zeros(33, 51))
    weight.qdata.untyped_storage().resize_(0)
    hp = random_tensor(33, 51)
    shard, check = framed(torch.zeros(33 * 26, dtype=torch.uint8))
    cast_master_weights_to_nvfp4([weight], [hp.flatten()], [0], None, [shard])
    check()
    assert_bitwise_equal(shard.view(33, 26), NVFP4Tensor.from_hp(hp).qdata)


def test_nothing_to_do():
    cast_master_weights_to_fp8([], [], [])


FP8, NVFP4 = BlockwiseFP8Tensor.from_hp(torch.zeros(4, 16)), NVFP4Tensor.from_hp(torch.zeros(4, 16))
ONE_ROW = NVFP4Tensor.from_hp(torch.zeros(4, 16), block_size=(1, 16))
VIEW = BlockwiseFP8Tensor.from_hp(torch.zeros(16, 4)).t()
FLAT, BYTES = torch.ones(64), torch.zeros(10, dtype=torch.uint8)
# (weights, masters, start offsets, buffers or None, the error)
REFUSALS = {
    "plain": ([FLAT.view(4, 16)], [FLAT], [0], None, TypeError("must be a QuantizedTensor, got Tensor")),
    "lists": ([FP8], [FLAT], [0, 0], None, ValueError("an entry for each weight, got lengths [1, 1, 2]")),
    "twice": ([NVFP4, FP8, FP8], [None] * 3, [None] * 3, None, ValueError("is the same tensor as weight 1;")),
    "one row": ([ONE_ROW], [FLAT], [0], None, ValueError("has blocks of 1x16; create it with square blocks")),
    "a view": ([VIEW], [FLAT], [0], None, ValueError("is a view that is not contiguous; pass the original weight")),
    "only a start": ([FP8], [None], [5], None, ValueError("has no master and start offset 5; pass both")),
    "no start": ([FP8], [FLAT], [None], None, ValueError("has a master and start offset None; pass both")),
    "dtype": ([FP8], [FLAT.double()], [0], None, TypeError("float16 or float32, got torch.float64; cast")),
    "shape": ([FP8], [FLAT.view(4, 16)], [0], None, ValueError("flat, contiguous master, got shape [4, 16]")),
    "device": ([FP8], [FLAT.to("meta")], [0], None, ValueError("is on cpu, but its master on meta; move")),
    "devices": ([FP8, FP8.to("meta")], [None] * 2, [None] * 2, None, ValueError("is on meta, but the first one")),
    "outside": ([FP8], [FLAT], [1], None, ValueError("has 64 elements, but its master is for [1, 65)")),
    "shard": ([FP8], [FLAT[:5]], [3], [BYTES[:4]], ValueError("needs a flat shard of 5 bytes on cpu for")),
    "no shard": ([NVFP4], [FLAT[:6]], [3], [None], ValueError("of 4 bytes on cpu for elements [3, 9)")),
    "strides": ([FP8], [FLAT[:5]], [3], [BYTES[::2]], ValueError("got torch.uint8 of shape [5] with strides [2] on")),
}


@pytest.mark.parametrize(("weights", "masters", "starts", "buffers", "error"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(weights, masters, starts, buffers, error):
    with pytest.raises(type(error), match=re.escape(str(error))):
        cast_master_weights(weights, masters, starts, None, buffers)


def test_refuses_another_kind_by_name():
    with pytest.raises(TypeError, match="cast_master_weights_to_fp8: weight 0 must be a BlockwiseFP8Tensor, got NVFP4"):
        cast_master_weights_to_fp8([NVFP4], [FLAT], [0])
    with pytest.raises(ValueError, match=r"to_nvfp4: weight 0 \(NVFP4Tensor, shape \[4, 16\]\) has 64 elements"):
        cast_master_weights_to_nvfp4([NVFP4], [FLAT], [1])
