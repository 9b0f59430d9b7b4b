"""`baddbmm` of a quantized weight and an adapter's factors: a master weight of decoded values and their product."""

from __future__ import annotations

import io

import pytest
import torch
from helpers import FP8, NVFP4, both_formats, every_kind, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

W, B, A = random_tensor(2, 32, 48), random_tensor(2, 32, 4), random_tensor(2, 4, 48)


def converted(from_hp):
    weight = from_hp(W)
    weight.config, weight.layer = NVFP4 if "NVFP4" in type(weight).__name__ else FP8, "experts.up"
    return weight


@every_kind
def test_the_sum_is_a_weight(from_hp):
    weight = converted(from_hp)
    b = B.clone().requires_grad_()
    total = torch.baddbmm(weight, b, A, alpha=0.5)
    assert type(total) is MasterWeightTensor and total.layer == "experts.up" and total.config.master_weights
    assert_bitwise_equal(total.hp.detach(), torch.baddbmm(weight.dequantize(), B, A, alpha=0.5))
    assert total.requires_grad


@every_kind
def test_what_is_not_an_adapter_is_refused(from_hp):
    """GEMMs with the weight itself would be in high precision; a tensor that no conversion made has no recipe."""
    for baddbmm in (
        lambda: torch.baddbmm(from_hp(W), B, A),
        lambda: torch.baddbmm(torch.zeros(2, 4, 48), torch.zeros(2, 4, 32), converted(from_hp)),
    ):
        with pytest.raises(NotImplementedError, match="an adapter b @ a is added only to a converted weight"):
            baddbmm()


def loaded(layer):
    """As `torch.load` makes it: without the values that it was quantized from."""
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def unfrozen(layer):
    """Frozen when it was converted, and trained later."""
    other = nn.Linear(32, 48, bias=False)
    other.weight.requires_grad_(False)
    quantize_(other, layer.weight.config)
    other.weight.requires_grad_(True)
    return other


@both_formats
@pytest.mark.parametrize("made", (lambda layer: layer, loaded, unfrozen), ids=("converted", "loaded", "unfrozen"))
def test_small_steps_of_a_weight_that_trains_are_refused(made, config):
    """Each would be rounded away."""
    layer = nn.Linear(32, 48, bias=False)
    quantize_(layer, replace(config, master_weights=False))
    weight = made(layer).weight
    assert weight.requires_grad
    for alias in (weight.data, weight.detach()):
        with pytest.raises(NotImplementedError, match="MasterWeightOptimizer"):
            alias.add_(torch.full((48, 32), 1e-5))
