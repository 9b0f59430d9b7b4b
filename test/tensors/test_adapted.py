"""`baddbmm` of a quantized weight and an adapter's factors: a master weight of decoded values and their product."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, NVFP4, every_kind

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
def test_what_is_no_adapter_is_refused(from_hp):
    """Products with the weight itself would be in high precision; a tensor of nobody's has no recipe."""
    with pytest.raises(NotImplementedError, match="an adapter b @ a is added to a converted weight alone"):
        torch.baddbmm(from_hp(W), B, A)
    with pytest.raises(NotImplementedError, match="its factors are plain tensors"):
        torch.baddbmm(torch.zeros(2, 4, 48), torch.zeros(2, 4, 32), converted(from_hp))
