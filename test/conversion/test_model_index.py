"""A model is indexed once a `quantize_` call, and the index is of the model as it is then."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, NVFP4, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, conversion_report, dry_run
from torchao_blockwise.conversion import model_index
from torchao_blockwise.conversion.model_index import ModelIndex


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))


@pytest.fixture
def made(monkeypatch) -> list[ModelIndex]:
    """The indexes that were made."""
    found = []
    original = ModelIndex.__init__

    def counted(self, model) -> None:
        found.append(self)
        original(self, model)

    monkeypatch.setattr(ModelIndex, "__init__", counted)
    return found


@pytest.mark.parametrize("config", (FP8, NVFP4, replace(FP8, master_weights=False)), ids=("fp8", "nvfp4", "quantized"))
def test_a_call_looks_once_however_many_layers_there_are(config, made):
    """Once for each layer took 43 s for 2000 of them."""
    model = layers(12)
    quantize_(model, config)
    assert len(made) == 1 and all(layer.status == "converted" for layer in conversion_report(model).layers)
    quantize_(layers(5), config)
    assert len(made) == 2
    dry_run(layers(5), config)
    assert len(made) == 3


def test_each_call_sees_the_model_as_it_is():
    model = layers(2)
    quantize_(model, FP8)
    model.append(nn.Linear(32, 32))
    model.insert(0, nn.Linear(32, 32))
    tied = nn.Linear(32, 32)
    tied.weight = model[3].weight
    model.append(tied)
    quantize_(model, FP8)
    assert all(type(layer.weight) is MasterWeightTensor for layer in model)
    assert [layer.weight.layer for layer in model] == [f"{i}.weight" for i in (0, 1, 2, 4, 4)]
    # Both holders of the tied weight save plain values.
    assert all(type(x) is torch.Tensor for x in model.state_dict().values())


def test_a_layer_may_be_replaced_while_others_are_converted(monkeypatch):
    """As PEFT does to a layer that it merges: a plain tensor takes the place of a converted weight."""
    model = layers(3)
    quantize_(model, FP8)
    for layer in model:
        values = layer.weight.dequantize().detach()
        del layer.weight
        layer.weight = values
        quantize_(layer, FP8)
        assert type(layer.weight) is MasterWeightTensor and not layer.weight.requires_grad


def test_it_holds_nothing():
    model = layers(2)
    quantize_(model, FP8)
    before = model_index._last.index
    assert before.is_of(model)
    del model
    assert before._model() is None
