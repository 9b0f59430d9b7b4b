"""What a conversion knows of the `quantize_` call around it; the one stack walk, until torchao says it to handlers."""

from __future__ import annotations

import pytest
import torch
from helpers import FULL, Tied
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import MasterWeightTensor, _compat, experts, recipe_state, skip_fqns
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.nn.converted import ConvertedLinear

pytestmark = pytest.mark.usefixtures("no_interpreter")


def rounding_streams() -> bool:
    """Each weight has the random bits of its place in the model, whatever else is converted."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    quantize_(model, FULL, filter_fn=skip_fqns("1"))
    return [state["stream"] for state in recipe_state(model).values()] == [0, 8]


def layer_names() -> bool:
    model = nn.Sequential(nn.Linear(32, 32), SwiGLUExperts(2, 32, 32))
    quantize_(model, FULL)
    quantize_(model, FULL, filter_fn=experts())
    names = [p.layer for p in model.parameters() if isinstance(p, MasterWeightTensor)]
    return names == ["0.weight", "1.gate_up", "1.down"] and model[0].fqn == "0"


def names_of_single_weights() -> bool:
    model = nn.Sequential(SwiGLUExperts(2, 32, 32))
    quantize_(model, FqnToConfig({"0.down": FULL}), filter_fn=None)
    return model[0].down.layer == "0.down"


def tied_layers() -> bool:
    """The other layer that holds the weight is converted too, though the filter leaves it out."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    quantize_(model, FULL, filter_fn=skip_fqns("1"))
    return isinstance(model[1], ConvertedLinear)


def tied_embeddings() -> bool:
    """State dicts have plain tensors under each name of the weight."""
    model = Tied()
    quantize_(model, FULL)
    return type(model.state_dict()["embed.weight"]) is torch.Tensor


def nothing_was_changed() -> bool:
    """A layer that cannot be converted, behind one that can."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"1 of \d layers cannot be converted, so nothing was changed"):
        quantize_(model, FULL)
    return type(model[0].weight) is nn.Parameter


PROPERTIES = rounding_streams, layer_names, names_of_single_weights, tied_layers, tied_embeddings, nothing_was_changed


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda f: f.__name__)
def test_a_conversion_knows_its_model(holds, monkeypatch):
    assert holds()
    monkeypatch.setattr(_compat, "quantize_call", lambda: (None, None, None))
    assert not holds(), "it does not depend on the walk: remove this case"
