"""Weights whose values begin inside a storage: flat buffers, and slices of a packed matrix, are copied and saved."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, every_kind, master, saved_and_loaded, weight
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.tensors.transposed_weight import TransposedWeight
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


def in_flat_buffer(*shape: int) -> MasterWeightTensor:
    buffer = torch.zeros(64 + weight(*shape).numel() + 8)
    hp = buffer[64:-8].view(shape)
    hp.copy_(weight(*shape))
    return MasterWeightTensor(hp, FP8)


WEIGHTS = {
    "flat_buffer": lambda: in_flat_buffer(40, 24),
    "experts": lambda: in_flat_buffer(3, 40, 24),
    "rows_of_qkv": lambda: master(120, 24).data.chunk(3)[1],
    "columns": lambda: master(40, 72).data[:, 24:48],
    "t_of_columns": lambda: master(24, 120).data[:, 40:80].t(),
}
every_weight = pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch_save": saved,
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def assert_copy(other, x) -> None:
    """`other` is a weight as `x` over other memory, and reports how its values lie there."""
    assert type(other) is type(x) is MasterWeightTensor and other.config == x.config
    assert_bitwise_equal(other.hp, x.hp)
    for w in (other, x):
        assert (w.stride(), w.storage_offset()) == (w.hp.stride(), w.hp.storage_offset())
        assert w.data_ptr() == w.hp.data_ptr()
    assert other.data_ptr() != x.data_ptr() and other.requires_grad == x.requires_grad


@every_weight
@every_copy
def test_copies_of_weights(make, copied):
    x = make()
    assert_copy(copied(x), x)
    assert_copy(saved_and_loaded(x), x)
    parameter = nn.Parameter(make())
    assert_copy(copied(parameter), parameter)


@every_copy
def test_copies_of_transposed_views(copied):
    for x in (in_flat_buffer(3, 40, 24).mT, in_flat_buffer(6, 40, 24)[3:].mT):
        other = copied(x)
        assert type(other) is TransposedWeight and other.shape == x.shape
        assert_copy(other.weight, x.weight)
        assert other.data_ptr() == other.weight.data_ptr() and x.data_ptr() == x.weight.data_ptr()


@pytest.mark.parametrize("copied", (copy.deepcopy, saved), ids=("deepcopy", "torch_save"))
def test_weights_of_one_buffer_stay_in_one_buffer(copied):
    packed = master(120, 24).data
    first, *_, last = copied([nn.Parameter(part) for part in packed.chunk(3)])
    assert last.data_ptr() - first.data_ptr() == 2 * 40 * 24 * 4


def test_copies_with_a_gradient():
    parameter = nn.Parameter(in_flat_buffer(40, 24))
    F.linear(weight(8, 24), parameter).sum().backward()
    other = copy.deepcopy(parameter)
    assert torch.equal(other.grad, parameter.grad) and other.grad is not parameter.grad
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(parameter * 2)


@every_kind
@every_copy
@pytest.mark.parametrize("part", (slice(128, None), (slice(None), slice(128, None))), ids=("rows", "columns"))
def test_slices_of_quantized_tensors(from_hp, copied, part):
    x = from_hp(weight(256, 256))[part]
    other = copied(x)
    assert torch.equal(other, x) and other.qdata.data_ptr() != x.qdata.data_ptr()
    assert other.stride() == x.stride() and other.qdata.stride() == x.qdata.stride()


def test_a_model_of_such_weights_is_averaged():
    model = nn.ParameterList([nn.Parameter(make()) for make in WEIGHTS.values()])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        for weight in model:
            weight.add_(1)
    average.update_parameters(model)
    for other, weight in zip(average.module, model, strict=True):
        assert type(other) is MasterWeightTensor and other.data_ptr() != weight.data_ptr()
        torch.testing.assert_close(other.hp, weight.hp - 0.5)
