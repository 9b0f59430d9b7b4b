"""Weights that a model multiplies by itself: refused where the product runs, by name and with a remedy."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    is_linear,
    linears_and_experts,
    recommended_layers,
    skip_fqns,
    skip_lm_head,
)

pytestmark = pytest.mark.usefixtures("no_interpreter")
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
REFUSED = r"{}\.weight would silently be used in high precision.*nn\.functional\.linear.*skip_fqns"


class Caller(nn.Module):
    """Multiplies by the weight of a layer that it holds, as Mamba's mixer does."""

    def __init__(self):
        super().__init__()
        self.by_hand, self.called = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return (nn.functional.linear(x, self.called.weight) + self.called(x)) @ self.by_hand.weight.t()


def test_a_product_is_refused_by_name_and_the_remedy_helps():
    """All products are in test_operations.py."""
    model = nn.Sequential(Caller())
    quantize_(model, FP8)
    with pytest.raises(NotImplementedError, match=REFUSED.format(r"0\.by_hand")):
        model(X)
    model = nn.Sequential(Caller())
    quantize_(model, FP8, filter_fn=skip_fqns("0.by_hand"))
    model(X).sum().backward()


IDS = torch.arange(34).view(2, 17)


def language_model(family: str, **options) -> nn.Module:
    pytest.importorskip("transformers", "5.0")
    import exported_models

    return exported_models.language_model(family, None, **options)


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_gpt_oss_is_refused_with_eager_experts_and_trains_with_the_remedy(masters):
    model = language_model("GptOss", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("eager")
    quantize_(model, replace(FP8, master_weights=masters), filter_fn=linears_and_experts() & skip_lm_head())
    named = r"model\.layers\.0\.mlp\.experts\.gate_up_proj.*"
    with pytest.raises(NotImplementedError, match=rf'{named}model\.set_experts_implementation\("grouped_mm"\)'):
        model(input_ids=IDS, labels=IDS)
    model.set_experts_implementation("grouped_mm")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert type(model.model.layers[0].mlp.experts.down_proj) is not nn.Parameter
    assert all(p.grad is not None for name, p in model.named_parameters() if "experts" in name)


# Others train in test_fusion.py and test_expert_models.py.
FAMILIES = {
    "Phi3": {"pad_token_id": 0},
    # Its layers are no `nn.Linear`; the head is.
    "GPT2": {},
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 48, "state_size": 8, "n_groups": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_train_are_not_refused(family):
    model = language_model(family, **FAMILIES[family])
    quantize_(model, FP8, filter_fn=is_linear() if family == "GPT2" else recommended_layers(model))
    model(input_ids=IDS, labels=IDS).loss.backward()
    converted = [p for p in model.parameters() if isinstance(p, MasterWeightTensor)]
    assert converted and all(p.grad is not None for p in converted)
