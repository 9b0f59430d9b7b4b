"""Parts of quantized tensors that do not fit each other are refused, wherever a tensor is made of them."""

import collections
import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, every_kind, replace, saved_and_loaded, weight
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, NVFP4Tensor, ops
from torchao_blockwise.tensors import QuantizedShard
from torchao_blockwise.tensors.fsdp import ShardLayout
from torchao_blockwise.tensors.quantized import _rebuild, as_bits
from torchao_blockwise.testing import assert_bitwise_equal

SHAPE = (130, 141)
LAYOUT = ShardLayout("w", SHAPE, torch.float32, 0, 1, 2, FP8)


def parts_of(kind: str) -> dict:
    """The arguments of a constructor by name."""
    if kind == "shard":
        q = BlockwiseFP8Tensor.from_hp(weight(*SHAPE))
        return {"qdata": q.qdata[65:], "scale": q.scale, "part": LAYOUT, "dtype": torch.float32}
    x = {"fp8": BlockwiseFP8Tensor, "nvfp4": NVFP4Tensor}[kind].from_hp(weight(*SHAPE))
    names, attributes = x.__tensor_flatten__()
    return {name: getattr(x, name) for name in names} | attributes


CLASSES = {"fp8": BlockwiseFP8Tensor, "nvfp4": NVFP4Tensor, "shard": QuantizedShard}


def layout(**changes) -> ShardLayout:
    return replace(LAYOUT, **changes)


# kind, argument, what is made of it, error
DAMAGE = {
    "one_scale": ("fp8", "scale", lambda s: s[:1, :1], r"tensor \[130, 141\] in fp8_128x128 has scale \[2, 2\]"),
    "scale_of_experts": ("fp8", "scale", lambda s: s[None], r"has scale \[2, 2\]"),
    "vector": ("fp8", "qdata", lambda q: q[0], r"the tensor must be \[\.\., N, K\], got shape \[141\]"),
    "bytes_for_e4m3": ("fp8", "qdata", lambda q: q.view(torch.uint8), r"must be torch.float8_e4m3fn and torch.float32"),
    "scale_f64": ("fp8", "scale", lambda s: s.double(), r"got torch.float8_e4m3fn and torch.float64"),
    "quantized_inside": ("fp8", "qdata", lambda q: BlockwiseFP8Tensor.from_hp(q.float()), r"got a BlockwiseFP8Tensor"),
    "other_device": ("fp8", "scale", lambda s: s.to("meta"), r"got a Tensor in torch.strided on meta; take"),
    "reported_int": ("fp8", "dtype", lambda d: torch.int8, r"dtype must be bfloat16, .* got torch.int8"),
    "config_of_other": ("fp8", "config", lambda c: NVFP4, r"a NVFP4TrainingConfig trains nvfp4_16x16, not fp8_128x128"),
    "config_name": ("fp8", "config", lambda c: "fp8", r"config must be a TrainingConfig or None, got str"),
    "fp4_one_scale": ("nvfp4", "scale", lambda s: s[:1, :1], r"tensor \[130, 141\] in nvfp4_16x16 has scale \[9, 9\]"),
    "fp4_columns_more": ("nvfp4", "columns", lambda c: c + 2, r"tensor \[130, 143\] .* rows of 72 in qdata"),
    "fp4_columns_less": ("nvfp4", "columns", lambda c: c - 2, r"tensor \[130, 139\] .* rows of 70 in qdata"),
    "fp4_rows_of_scales": ("nvfp4", "block_size", lambda b: (1, 16), r"in nvfp4_1x16 has scale \[130, 9\]"),
    "fp4_unknown_block": ("nvfp4", "block_size", lambda b: (32, 32), r"block_size must be \(16, 16\) or \(1, 16\)"),
    "fp4_scale_f32": ("nvfp4", "scale", lambda s: s.float(), r"got torch.uint8 and torch.float32"),
    "fp4_global_vector": ("nvfp4", "global_scale", lambda g: g[None], r"got torch.float32 of shape \[1\]"),
    "fp4_config_of_other": ("nvfp4", "config", lambda c: FP8, r"trains fp8_128x128, not nvfp4_16x16"),
    "shard_rows": ("shard", "qdata", lambda q: q[1:], r"qdata must be the rows \[65, 141\] of w, got \[64, 141\]"),
    "shard_scales_of_rows": ("shard", "scale", lambda s: s[:1], r"tensor \[130, 141\] .* has scale \[2, 2\]"),
    "shard_of_other": ("shard", "part", lambda p: layout(shape=(260, 141), ranks=4), r"has scale \[3, 2\]"),
    "shard_of_columns": ("shard", "part", lambda p: layout(dim=1), r"must be the rows \[130, 70\] of w, got"),
    "shard_no_layout": ("shard", "part", lambda p: None, r"part must be a ShardLayout, got None"),
}  # fmt: skip


class Written:
    """Is written to a file as a call of a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce_ex__(self, protocol):
        return self.reduced


@pytest.mark.parametrize(("kind", "name", "change", "error"), DAMAGE.values(), ids=DAMAGE)
def test_parts_that_do_not_fit_are_refused(kind, name, change, error):
    """By constructors, where compilers make tensors, and in files: kernels take sizes from the payload."""
    parts = parts_of(kind)
    parts[name] = change(parts[name])
    with pytest.raises((TypeError, ValueError), match=f"^{CLASSES[kind].__name__}: .*{error}"):
        CLASSES[kind](**parts)
    tensors = {n: parts.pop(n) for n in ("qdata", "scale", "global_scale") if n in parts}
    with pytest.raises((TypeError, ValueError), match=error):
        CLASSES[kind].__tensor_unflatten__(tensors, parts, None, None)
    if not any(type(t) is not torch.Tensor or t.is_meta for t in tensors.values()):
        bits = {n: (as_bits(t), t.dtype) for n, t in tensors.items()}
        with pytest.raises((TypeError, ValueError), match=error):
            saved_and_loaded(Written(_rebuild, CLASSES[kind], bits, parts, {}, False))


@pytest.mark.parametrize("kind", CLASSES)
def test_what_was_set_from_outside_is_refused_where_it_is_used(kind):
    x = CLASSES[kind](**parts_of(kind))
    x.scale = x.scale[:1, :1]
    uses = [x.dequantize, x.detach, x.clone, lambda: copy.deepcopy(x), lambda: saved_and_loaded(x)]
    if kind != "shard":
        uses += [x.columnwise, lambda: x[:128], lambda: F.linear(torch.ones(3, SHAPE[1]), x)]
    for use in uses:
        with pytest.raises(ValueError, match=r"in .* has scale"):
            use()


@every_kind
def test_swapped_tensors_stay_whole(from_hp):
    a, b = nn.Parameter(from_hp(weight(32, 48))), nn.Parameter(from_hp(weight(16, 16, seed=1)))
    expected = b.dequantize(), a.dequantize()
    torch.utils.swap_tensors(a, b)
    for x, values in zip((a, b), expected):
        assert x.shape == values.shape
        assert_bitwise_equal(x.dequantize(), values)
        assert_bitwise_equal(x.clone().dequantize(), values)


def test_data_of_another_block_size_leaves_the_weight_as_it_was():
    a, b = (NVFP4Tensor.from_hp(weight(32, 48), block_size=size) for size in ((16, 16), (1, 16)))
    before = a.dequantize()
    with pytest.raises(ValueError, match="the target is nvfp4_16x16, the source nvfp4_1x16"):
        a.data = b
    assert_bitwise_equal(a.dequantize(), before)


def test_data_of_a_shard_of_another_weight_is_refused():
    a = QuantizedShard(**parts_of("shard"))
    q = BlockwiseFP8Tensor.from_hp(weight(260, 141))
    b = QuantizedShard(q.qdata[65:130], q.scale, layout(shape=(260, 141), ranks=4), torch.float32)
    with pytest.raises(ValueError, match=r"tensor \[130, 141\] .* has scale \[2, 2\]"):
        a.data = b
    a.dequantize()


# --- files ------------------------------------------------------------------------------------------------------------


def test_attributes_that_users_set_are_not_written():
    x = nn.Parameter(BlockwiseFP8Tensor.from_hp(weight(16, 16)))
    x.main_grad = torch.zeros(1000, 1000)
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() < 100_000 and not hasattr(saved_and_loaded(x), "main_grad")


def test_a_file_cannot_change_a_backend():
    assert saved_and_loaded(replace(FP8, backend="reference")).backend is ops.Backend.REFERENCE
    state = Written(ops.Backend, "reference")
    state.reduced += ({"_value_": "triton"},)
    with pytest.raises(Exception, match="Can only build"):
        saved_and_loaded(state)
    assert ops.Backend.REFERENCE.value == "reference"


def test_attributes_that_pytorch_sets_on_a_parameter_do_not_reach_a_kernel():
    q = BlockwiseFP8Tensor.from_hp(weight(*SHAPE))
    arguments = q, True, collections.OrderedDict(), {"scale": torch.ones(1, 1)}
    x = saved_and_loaded(Written(torch._utils._rebuild_parameter_with_state, *arguments))
    with pytest.raises(ValueError, match=re.escape("has scale [2, 2]")):
        F.linear(torch.ones(3, SHAPE[1]), x)
