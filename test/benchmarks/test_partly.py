"""Layers of which parts are quantized: what changes, and by how much."""

import copy

import pytest
import torch
from helpers import named_results
from llm_cases import CPU, TINY
from llm_training.partly import PARTS, PartlyQuantizedLinear
from llm_training.recipes import convert
from llm_training.training import Trainer
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise.testing import random_tensor, relative_error

CONFIGS = {
    "fp8": BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128"),
    "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
}
# Part -> the results that read it.
CHANGES = {
    "x": {"output", "grad_weight"},
    "w": {"output", "grad_input"},
    "dy": {"grad_input", "grad_weight"},
    **{gemm: {gemm} for gemm in ("output", "grad_input", "grad_weight")},
}


def results(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("output", "grad_input", "grad_weight"), named_results(layer, x, dy).values(), strict=True))


@pytest.mark.parametrize("fmt", CONFIGS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_changes_the_results_that_read_it(fmt, part):
    """A GEMM of two quantized operands is that of a converted layer, with operands rounded to bf16."""
    layer = nn.Linear(144, 80, bias=False).bfloat16()
    x, dy = random_tensor(3, 11, 144).bfloat16(), random_tensor(3, 11, 80).bfloat16()
    plain = results(layer, x, dy)
    converted = copy.deepcopy(layer)
    quantize_(converted, CONFIGS[fmt])
    whole = results(converted, x, dy)
    found = results(PartlyQuantizedLinear(layer.weight, fmt, part), x, dy)
    assert {gemm for gemm in found if not torch.equal(found[gemm], plain[gemm])} == CHANGES[part]
    for gemm in CHANGES[part]:
        assert relative_error(found[gemm], plain[gemm]) < 1.1 * relative_error(whole[gemm], plain[gemm])
    if part in CHANGES[part]:
        assert relative_error(found[part], whole[part]) < 0.006 < relative_error(plain[part], whole[part])


@pytest.mark.parametrize("recipe", ("fp8_only_x", "nvfp4_only_grad_weight"))
def test_a_model_is_converted(recipe):
    model = Trainer("bf16", TINY, CPU).model
    words = convert(model, recipe)
    layers = [m for m in model.modules() if isinstance(m, PartlyQuantizedLinear)]
    fmt, _, part = recipe.partition("_only_")
    assert words == f"{part} of {len(layers)} layers in {fmt}" and len(layers) == 4 * TINY.layers
    assert type(model.lm_head) is nn.Linear
