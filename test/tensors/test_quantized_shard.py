"""QuantizedShard: the rows of a quantized weight that one rank holds, without ranks."""

import dataclasses

import pytest
import torch
from helpers import FP8, both_formats, replace, saved_and_loaded, weight
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8Tensor, NVFP4Tensor
from torchao_blockwise.tensors import QuantizedShard
from torchao_blockwise.testing import assert_bitwise_equal

SPLITS = [(rows, ranks) for rows in (300, 64, 5, 1) for ranks in (1, 3, 4)]


def converted(config, rows: int, columns: int = 33, dtype=torch.float32) -> nn.Parameter:
    layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
    layer.weight.data = weight(rows, columns, dtype=dtype)
    quantize_(layer, replace(config, master_weights=False))
    return layer.weight


def rows_of(whole: torch.Tensor, rank: int, ranks: int, dtype=torch.float32) -> QuantizedShard:
    """The shard that `fully_shard` gives a rank of `whole`, by the calls that it makes."""
    chunks = torch.chunk(whole, ranks, dim=0)
    with torch.no_grad():
        padded = whole.new_zeros(chunks[0].shape)
        length = chunks[rank].shape[0]
        if length:
            padded.narrow(0, 0, length).copy_(chunks[rank])
        shard = padded.narrow(0, 0, length)
    shard.part = dataclasses.replace(shard.part, dtype=dtype)
    return shard


@both_formats
@pytest.mark.parametrize(("rows", "ranks"), SPLITS)
def test_rows_stand_for_the_values_of_the_whole_and_make_it(config, rows, ranks):
    whole = converted(config, rows)
    shards = [rows_of(whole, rank, ranks) for rank in range(ranks)]
    for x in shards:
        assert type(x) is QuantizedShard and x.dtype == torch.float32 and x.part.shape == whole.shape
        assert_bitwise_equal(x.scale, whole.scale)
        assert x.awaits_cast
    assert_bitwise_equal(torch.cat([x.qdata.view(torch.uint8) for x in shards]), whole.qdata.view(torch.uint8))
    # Under autocast too, where a state dict may be made.
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            parts = [x.dequantize() for x in shards]
        assert_bitwise_equal(torch.cat(parts), whole.dequantize())
    assert_bitwise_equal(torch.cat([x.values() for x in shards]), weight(rows, 33))
    assert_bitwise_equal(torch.cat([x.dequantize(torch.bfloat16) for x in shards]), whole.dequantize(torch.bfloat16))
    # What is sent is padded to the largest shard, and packed where rows split evenly.
    sent = []
    for x in shards:
        x.pending_master.cast_is_done()
        (payload,), gather = x.fsdp_pre_all_gather(None, None, None, None, None)
        layout, _, _ = gather
        assert payload.dtype == torch.uint8 and payload.is_contiguous()
        assert payload.shape == layout.payload_shape(layout.padded_shape)
        sent.append(payload)
    gathered, _ = x.fsdp_post_all_gather((torch.cat(sent),), gather, torch.float32)
    assert type(gathered) is type(whole.detach()) and torch.equal(gathered, whole)


@both_formats
def test_experts_are_split_by_the_expert(config):
    kind = NVFP4Tensor if config.weight_format.has_global_scale else BlockwiseFP8Tensor
    whole = nn.Parameter(kind.from_hp(weight(6, 150, 40), config=config))
    shards = [rows_of(whole, rank, 4) for rank in range(4)]
    assert [x.shape[0] for x in shards] == [2, 2, 2, 0]
    assert_bitwise_equal(torch.cat([x.dequantize() for x in shards]), whole.dequantize())


def test_values_wait_for_a_cast():
    x = rows_of(converted(FP8, 40), 0, 2)
    x.pending_master.cast_is_done()
    assert x.pending_master.hp is None
    values = weight(20, 33, dtype=torch.bfloat16, seed=3)
    for y in (x, x.detach().clone(), x.to(torch.bfloat16)):
        with torch.no_grad():
            y.copy_(values)
        assert y.pending_master.awaits_cast
        assert_bitwise_equal(y.values(), values)
        with pytest.raises(RuntimeError, match=r"gathers weight, but .*sync_weight_scales\(model\) on all ranks"):
            y.fsdp_pre_all_gather(None, None, None, nn.Linear(33, 40), None)
        copy = y.clone()
        assert copy.pending_master is not y.pending_master and copy.pending_master.awaits_cast
        assert_bitwise_equal(copy.values(), values)
    # A cast to another dtype rounds what is cast from now on; under a policy that has one, nothing changes.
    assert x.to(torch.bfloat16).part.dtype == x.to(torch.bfloat16).dtype == torch.bfloat16
    assert rows_of(converted(FP8, 40), 0, 2, torch.float16).to(torch.bfloat16).part.dtype == torch.float16
    assert x.pending_master is x.detach().pending_master is nn.Parameter(x, requires_grad=False).pending_master


@both_formats
def test_is_saved_and_copied_by_its_bytes(config):
    whole = converted(config, 40)
    x, other = (rows_of(whole, rank, 2) for rank in range(2))
    x.pending_master.cast_is_done()
    loaded = saved_and_loaded(x)
    assert type(loaded) is QuantizedShard and torch.equal(loaded, x) and loaded.part == x.part
    empty = torch.empty_like(x)
    with torch.no_grad():
        empty.copy_(x)
    assert torch.equal(empty, x) and not empty.pending_master.awaits_cast
    with pytest.raises(ValueError, match="the source must be a shard with the rows"), torch.no_grad():
        x.copy_(other)
    with pytest.raises(ValueError, match=r"the target has shape \[20, 33\], the source \[3, 33\]"), torch.no_grad():
        x.copy_(weight(3, 33))
    with pytest.raises(NotImplementedError, match="copy its values"), torch.no_grad():
        weight(20, 33).copy_(x)
    assert type(torch.zeros_like(x)) is torch.Tensor


def test_refuses_what_rows_are_not():
    whole = converted(FP8, 40)
    x = rows_of(whole, 0, 2)
    for refused in (
        lambda: x.t(),
        lambda: x[:4],
        lambda: x + 1,
        lambda: nn.functional.linear(x, x),
    ):
        with pytest.raises(NotImplementedError, match=r"convert with master_weights=True|quantized"):
            refused()


@both_formats
def test_memory_of_its_own_and_views_of_other_tensors(config):
    whole = converted(config, 256)
    x = rows_of(whole, 1, 2)
    assert x.qdata.untyped_storage().nbytes() == x.qdata.nbytes and x.scale.data_ptr() != whole.scale.data_ptr()
    assert type(torch.chunk(whole.detach(), 2)[0]) is type(whole.chunk(2)[0]) is not QuantizedShard
    assert type(whole.new_zeros(3)) is torch.Tensor


class Owner:
    def master(self, weight):
        return None


def test_values_are_not_copied_out_of_meta_tensors():
    x, owner = rows_of(converted(FP8, 40), 0, 2), Owner()
    x.pending_master.take(owner.master)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta tensor"), torch.no_grad():
        x.copy_(torch.empty(x.shape, device="meta"))
