"""The noise that tests of GEMMs expect of a format is that of its rounding, and of no other."""

from __future__ import annotations

import pytest
import torch
from helpers import RECIPES
from rounding_noise import noise_ratio, rounded

from torchao_blockwise import ops


def decoded(t, config):
    q = ops.quantize(t, config.activation_format, power_of_2_scales=config.power_of_2_scales, backend="reference")
    return ops.dequantize(q.rowwise, columns=t.shape[1], dtype=torch.float64)


def toward_zero(t, config):
    half_a_step = (12 * rounded(t, config.activation_format, config.power_of_2_scales).variance).sqrt() / 2
    return decoded((t - t.sign() * half_a_step).float(), config)


ROUNDINGS = {
    "to nearest": decoded,
    "toward zero": toward_zero,
    "along columns and then rows": lambda t, config: decoded(decoded(t.mT, config).mT.float(), config),
    "of nothing": lambda t, config: t.double(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_budget_sees_other_roundings(recipe, rounding):
    """Of one operand of a product; the other has half of the noise, and has it as it should."""
    config = RECIPES[recipe]
    torch.manual_seed(0)
    a, b = torch.randn(288, 352), torch.randn(224, 352)
    product = (ROUNDINGS[rounding](a, config) @ decoded(b, config).mT).float()
    models = [rounded(t, config.activation_format, config.power_of_2_scales) for t in (a, b)]
    ratio, least, most = noise_ratio(product, *models)
    # Scales that are powers of two leave an element on the grid of any other such scale.
    harmless = rounding == "to nearest" or (rounding.startswith("along") and config.power_of_2_scales)
    assert (least <= ratio <= most) == harmless, ratio
