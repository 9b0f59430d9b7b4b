"""Layers that transform both operands of `grad_weight`: gradients are those of the operations, however they run."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import HADAMARD, replace, weight

from torchao_blockwise import MasterWeightTensor, NVFP4TrainingConfig, ops
from torchao_blockwise.formats import DEFAULT_SIGNS, NVFP4_1X16
from torchao_blockwise.nn import grouped_linear, linear
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
OTHER_SIGNS = (1, -1) * 8
ON_THE_REFERENCE = replace(HADAMARD, backend="reference")


def _columnwise(x, hadamard):
    made = ops.quantize(
        x, NVFP4_1X16, rowwise=False, columnwise=True, hadamard=hadamard, padded=True, backend="reference"
    )
    return made.columnwise


def _grads(layer, config, x, w, dy):
    x, weight = x.clone().requires_grad_(), torch.nn.Parameter(MasterWeightTensor(w.clone(), config))
    out = layer(x, weight)
    out.backward(dy)
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("save_activations", ("quantized", "high_precision"))
@pytest.mark.parametrize("signs", (True, OTHER_SIGNS), ids=("default signs", "other signs"))
@pytest.mark.parametrize("tokens", (64, 50, 1))
def test_linear_is_its_operations(tokens, signs, save_activations):
    x, w, dy = weight(tokens, 40), weight(24, 40, seed=1), weight(tokens, 24, seed=2)
    config = replace(ON_THE_REFERENCE, hadamard=signs, save_activations=save_activations)
    out, grad_x, grad_weight = _grads(linear, config, x, w, dy)
    operands = _columnwise(dy, signs), _columnwise(x, signs)
    assert_bitwise_equal(grad_weight, ops.matmul(*operands, out_dtype=torch.float32, backend="reference"))
    # Of the other products nothing is transformed.
    plain = _grads(linear, replace(config, hadamard=False), x, w, dy)
    assert_bitwise_equal(out, plain[0])
    assert_bitwise_equal(grad_x, plain[1])
    # A lone token is as far from its neighbors, which are zeros, in each value of the transform.
    assert torch.equal(grad_weight, plain[2]) == (tokens == 1)


@pytest.mark.parametrize("as_stored", (True, False), ids=("[E, N, K]", "[E, K, N]"))
def test_experts_are_their_operations(as_stored):
    x, dy = weight(70, 40), weight(70, 24, seed=2)
    ends = torch.tensor([20, 20, 55, 64], dtype=torch.int32)
    w = weight(4, *((24, 40) if as_stored else (40, 24)), seed=1)

    def layer(x, weight):
        return grouped_linear(x, weight, ends) if as_stored else F.grouped_mm(x, weight, offs=ends)

    *_, grad_weight = _grads(layer, ON_THE_REFERENCE, x, w, dy)
    first, second = (dy, x) if as_stored else (x, dy)
    operands = (
        ops.quantize(
            t, NVFP4_1X16, groups=ends, rowwise=False, columnwise=True, hadamard=True, backend="reference"
        ).columnwise
        for t in (first, second)
    )
    wanted = ops.grouped_matmul(*operands, ends, along="k", out_dtype=torch.float32, backend="reference")
    assert_bitwise_equal(grad_weight, wanted)


def test_configs_are_values():
    assert NVFP4TrainingConfig(hadamard=list(DEFAULT_SIGNS)) == NVFP4TrainingConfig(hadamard=DEFAULT_SIGNS)
    for config in (HADAMARD, replace(HADAMARD, hadamard=OTHER_SIGNS)):
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    # What another version has not saved has the default.
    old = object.__new__(NVFP4TrainingConfig)
    old.__setstate__({"backend": "auto", "save_activations": "nvfp4"})
    assert old == NVFP4TrainingConfig()
