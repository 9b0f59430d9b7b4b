"""Copies and files of weights: deepcopy, pickle and torch.save, also of values that begin inside a storage."""

import copy
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, every_kind, master, mlp, replace, saved_and_loaded, weight
from quantized_tensors import assert_same, with_config
from torch import nn

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.tensors.transposed_weight import TransposedWeight
from torchao_blockwise.testing import assert_bitwise_equal

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch_save": saved_and_loaded,
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


# --- master weights ---------------------------------------------------------------------------------------------------


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


def assert_copy(other, x) -> None:
    """`other` is a weight as `x` over other memory, and reports how its values lie there."""
    assert type(other) is type(x) is MasterWeightTensor and other.config == x.config
    assert_bitwise_equal(other.hp, x.hp)
    for w in (other, x):
        assert (w.stride(), w.storage_offset()) == (w.hp.stride(), w.hp.storage_offset())
        assert w.data_ptr() == w.hp.data_ptr()
    assert other.data_ptr() != x.data_ptr() and other.requires_grad == x.requires_grad


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@every_copy
def test_copies_of_master_weights(make, copied):
    for x in (make(), nn.Parameter(make())):
        assert_copy(copied(x), x)


@pytest.mark.parametrize("copied", (copy.deepcopy, COPIES["pickle"]), ids=("deepcopy", "pickle"))
def test_copies_of_transposed_views(copied):
    for x in (in_flat_buffer(3, 40, 24).mT, in_flat_buffer(6, 40, 24)[3:].mT):
        other = copied(x)
        assert type(other) is TransposedWeight and other.shape == x.shape
        assert_copy(other.weight, x.weight)
        assert other.data_ptr() == other.weight.data_ptr() and x.data_ptr() == x.weight.data_ptr()


@every_copy
def test_copies_know_no_layer_and_no_source(copied):
    """A cast whose GEMMs read the weight is saved as what it is, and so is a weight of a converted model."""
    parameter = mlp(FP8)[0].weight
    linked = parameter.bfloat16().detach()
    assert parameter.layer == "0.weight" and linked.source[0] is parameter.hp
    other = copied(linked)
    assert other.source[0] is other.hp
    assert_bitwise_equal(other.hp, parameter.hp.bfloat16())
    assert copied is copy.deepcopy or copied(parameter).layer == ""


@pytest.mark.parametrize("copied", (copy.deepcopy, saved_and_loaded), ids=("deepcopy", "torch_save"))
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


# --- quantized tensors ------------------------------------------------------------------------------------------------

PARTS = {
    "whole": ((256, 256), ...),
    "odd": ((2, 129, 127), ...),
    "empty": ((0, 128), ...),
    "rows": ((256, 256), slice(128, None)),
    "columns": ((256, 256), (slice(None), slice(128, None))),
}


@every_kind
@every_copy
@pytest.mark.parametrize("part", PARTS)
def test_copies_of_quantized_tensors(from_hp, copied, part):
    shape, index = PARTS[part]
    x = with_config(from_hp, weight(*shape, dtype=torch.bfloat16))
    x = x if index is ... else x[index]
    for tensor, is_parameter in ((x, False), (nn.Parameter(x), True), (nn.Parameter(x, requires_grad=False), True)):
        other = copied(tensor)
        assert_same(other, tensor, is_parameter=is_parameter)
        assert other.stride() == x.stride() and other.qdata.stride() == x.qdata.stride()
        assert other.qdata.data_ptr() != x.qdata.data_ptr() or x.numel() == 0


# --- files ------------------------------------------------------------------------------------------------------------

CONFIGS = [replace(c, **k) for c in (FP8, NVFP4) for k in ({}, {"out_dtype": torch.bfloat16, "backend": "reference"})]


def test_state_dicts_load_in_another_process(tmp_path):
    expected = []
    for index, (config, master_weights) in enumerate(itertools.product(CONFIGS, (True, False))):
        model = mlp(replace(config, master_weights=master_weights))
        torch.save({"state": model.state_dict(), "weight": model[0].weight}, tmp_path / f"{index}.pt")
        kind = type(model[0].weight).__name__
        expected.append(f"Tensor {kind} {config.out_dtype} True")
    code = """
import sys, torch, torchao_blockwise
for index in range(int(sys.argv[2])):
    saved = torch.load(f"{sys.argv[1]}/{index}.pt", weights_only=True)
    state, weight = saved["state"]["0.weight"], saved["weight"]
    print(type(state).__name__, type(weight).__name__, weight.config.out_dtype, weight.requires_grad)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), str(len(expected))]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == expected


@every_kind
def test_weights_in_containers_keep_their_ties(from_hp):
    q, p = nn.Parameter(from_hp(weight(48, 64))), master(40, 24)
    loaded = saved_and_loaded({"a": q, "b": [q, q.detach()], "c": p, "d": p})
    assert loaded["a"] is loaded["b"][0] and torch.equal(loaded["a"], q) and torch.equal(loaded["b"][1], q)
    assert loaded["c"] is loaded["d"]
