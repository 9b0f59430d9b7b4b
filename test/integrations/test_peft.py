"""PEFT's LoRA on frozen quantized bases: adapters are saved, loaded, merged and unloaded; experts, too."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, both_formats, replace
from torchao.quantization import quantize_

from torchao_blockwise import experts, linears_and_experts, skip_lm_head
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", "5.0")

pytestmark = pytest.mark.usefixtures("no_interpreter")
IDS = torch.arange(20).view(1, 20)
LINEAR = {"target_modules": ["q_proj", "o_proj"]}
EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def base(config, masters, chosen=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        ),
        experts_implementation="grouped_mm",
    )  # fmt: skip
    chosen = chosen or linears_and_experts() & skip_lm_head()
    quantize_(model, replace(config, master_weights=masters), filter_fn=chosen)
    return model


def trained(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert parameters and all(p.any() for p in parameters)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@both_formats
@pytest.mark.parametrize(
    ("adapts", "masters"),
    ((LINEAR, True), (LINEAR, False), (EXPERTS, True), (EXPERTS, False)),
    ids=("linear", "linear_quantized", "experts", "experts_quantized"),
)
def test_an_adapter_comes_back(adapts, masters, config, tmp_path):
    """What an adapter that is saved says over the same base is what it said; the base itself did not change."""
    model = base(config, masters)
    frozen, before = {name: x.clone() for name, x in model.state_dict().items()}, logits(model)
    adapted = trained(peft.get_peft_model(model, peft.LoraConfig(r=4, **adapts)))
    expected = logits(adapted)
    assert not torch.equal(expected, before)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(config, masters), tmp_path)
    assert_bitwise_equal(logits(again), expected)
    unloaded = again.unload()
    assert_bitwise_equal(logits(unloaded), before)
    assert unloaded.state_dict().keys() == frozen.keys()
    for name, x in unloaded.state_dict().items():
        assert_bitwise_equal(x, frozen[name], name)


def decoded(model, config):
    """The same model with the decoded values of its quantized experts as master weights."""
    other = base(config, True, experts())
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in other.named_parameters():
            weight = weights[name]
            p.copy_(weight.dequantize() if isinstance(weight, QuantizedTensor) else weight)
    return other


@both_formats
def test_experts_train_on_decoded_values(config):
    """Losses, gradients of adapters and merged weights of quantized experts are those of masters with their values."""
    # Linear layers stay plain: only what is adapted is quantized again.
    model = base(config, False, experts())
    both = []
    for each in (model, decoded(model, config)):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(each, peft.LoraConfig(r=4, init_lora_weights=False, **EXPERTS))
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        both.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.requires_grad)])
    assert len(both[0]) == 5
    for got, expected in zip(*both):
        assert_bitwise_equal(got, expected)


def test_merging_into_quantized_experts_says_what_to_do():
    adapted = peft.get_peft_model(base(FP8, False), peft.LoraConfig(r=4, **EXPERTS))
    with pytest.raises(NotImplementedError, match=r"experts\.(gate_up|down)_proj.*master_weights=True"):
        adapted.merge_and_unload()
