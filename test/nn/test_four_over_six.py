"""Layers whose blocks choose between two scales: they are their operations, however they run."""

from __future__ import annotations

import pickle

import pytest
import torch
from expert_modules import swiglu_experts
from helpers import FOUR_OVER_SIX, assert_same, mlp, replace, weight
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4Tensor, NVFP4TrainingConfig, ops
from torchao_blockwise.formats import NVFP4_1X16, StochasticRounding
from torchao_blockwise.nn import SwiGLUExperts, grouped_linear
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
CONFIG = replace(FOUR_OVER_SIX, backend="reference")
VARIANTS = {
    "defaults": {},
    "nearest": {"hadamard": False, "stochastic_rounding": False},
    "high_precision": {"save_activations": "high_precision"},
    "quantized_weight": {"master_weights": False},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
ROUNDING = StochasticRounding(seed=7, stream=0)
OPTIONS = {"four_over_six": True, "hadamard": True, "columnwise": True, "backend": "reference"}


def gradients(model, run=None) -> list[torch.Tensor]:
    model.zero_grad()
    x = weight(50, 64, seed=3).requires_grad_()
    out = (model if run is None else run)(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("tokens", (64, 50, 1))
def test_linear_is_its_operations(tokens):
    model = nn.Sequential(nn.Linear(40, 24, bias=False))
    quantize_(model, CONFIG)
    w, x, dy = model[0].weight, weight(tokens, 40).requires_grad_(), weight(tokens, 24, seed=2)
    out = model(x)
    out.backward(dy)
    saved = ops.quantize(x.detach(), NVFP4_1X16, padded=True, **OPTIONS)
    copies = ops.quantize(dy, NVFP4_1X16, stochastic=ROUNDING, padded=True, **OPTIONS)
    how = {"out_dtype": torch.float32, "backend": "reference"}
    assert_bitwise_equal(out.detach(), ops.matmul(saved.rowwise, w.quantized(), **how))
    assert_bitwise_equal(x.grad, ops.matmul(copies.rowwise, w.quantized(columnwise=True), **how))
    assert_bitwise_equal(w.grad, ops.matmul(copies.columnwise, saved.columnwise, **how))


def test_experts_are_their_operations():
    ends = torch.tensor([20, 20, 55, 64], dtype=torch.int32)
    model = SwiGLUExperts(4, 40, 24)
    quantize_(model, CONFIG, filter_fn=lambda module, name: True)
    x, dy = weight(70, 24).requires_grad_(), weight(70, 40, seed=2)
    grouped_linear(x, model.down, ends).backward(dy)
    copies = ops.grouped_quantize(dy, ends, NVFP4_1X16, stochastic=ROUNDING._replace(stream=4), **OPTIONS)
    saved = ops.grouped_quantize(x.detach(), ends, NVFP4_1X16, **OPTIONS).columnwise
    how = {"out_dtype": torch.float32, "backend": "reference"}
    wanted = ops.grouped_matmul(copies.columnwise, saved, ends, along="k", **how)
    assert_bitwise_equal(model.down.grad, wanted)
    wanted = ops.grouped_matmul(copies.rowwise, model.down.quantized(columnwise=True), ends, **how)
    assert_bitwise_equal(x.grad, wanted)


def test_weights_are_quantized_as_without():
    """Square blocks know one scale: a shard could not choose alone."""
    with_it, without = mlp(CONFIG), mlp(replace(CONFIG, four_over_six=False))
    for one, other in ((getattr(with_it, name).weight, getattr(without, name).weight) for name in "02"):
        for a, b in zip(one.quantized().tensors, other.quantized().tensors, strict=True):
            assert_bitwise_equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
    assert not torch.equal(gradients(with_it)[0], gradients(without)[0])


@every_variant
def test_compiled_and_checkpointed_passes_have_the_same_bits(variant):
    def made():
        return mlp(replace(CONFIG, **variant))

    wanted = gradients(made())
    model = made()
    assert_same(gradients(model, run=lambda x: checkpoint(model, x, use_reentrant=False)), wanted)
    torch._dynamo.reset()
    model = made()
    assert_same(gradients(model, run=torch.compile(model, backend="aot_eager", fullgraph=True)), wanted)


def test_inductor_gives_the_bits_of_eager_mode():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48, bias=False))
        quantize_(model, CONFIG)
        return model

    dy, results = weight(50, 48), []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, x = made(), weight(50, 64, seed=3).requires_grad_()
        run = torch.compile(model, backend="inductor", fullgraph=True) if compiled else model
        out = run(x)
        out.backward(dy)
        results.append((out.detach(), x.grad, model[0].weight.grad))
    assert_same(*results)


def test_compiled_experts_have_the_same_bits():
    ends = torch.tensor([20, 20, 50], dtype=torch.int32)

    model = swiglu_experts(CONFIG)
    wanted = gradients(model, run=lambda x: model(x, ends))
    torch._dynamo.reset()
    model = swiglu_experts(CONFIG)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(gradients(model, run=lambda x: compiled(x, ends)), wanted)


def test_configs_are_values_and_say_what_cannot_be():
    assert pickle.loads(pickle.dumps(FOUR_OVER_SIX)) == FOUR_OVER_SIX != NVFP4TrainingConfig(seed=7)
    with pytest.raises(TypeError, match="NVFP4TrainingConfig: four_over_six must be True or False, got 4"):
        NVFP4TrainingConfig(four_over_six=4)
    with pytest.raises(TypeError, match="four_over_six"):
        BlockwiseFP8TrainingConfig(four_over_six=True)
    assert NVFP4Tensor.from_hp(weight(16, 16), config=FOUR_OVER_SIX).config.four_over_six
