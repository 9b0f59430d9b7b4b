"""PEFT's LoRA on frozen quantized bases: adapters are saved, loaded, merged and unloaded; experts, too."""

import copy
import os
import pickle
from unittest import mock

import pytest
import torch
from helpers import FP8, assert_same, assert_same_tensors, both_formats, both_masters, converted, replace
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    conversion_report,
    dry_run,
    experts,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

peft = pytest.importorskip("peft")
pytest.importorskip("transformers", "5.0")

from exported_models import language_model, logits, losses  # noqa: E402

IDS = torch.arange(20).view(1, 20)
LINEAR = {"target_modules": ["q_proj", "o_proj"]}
EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.fixture(autouse=True)
def environment():
    """BOFT leaves CXX=gcc behind if it cannot build its extension, and what PyTorch compiles then lacks libstdc++."""
    with mock.patch.dict(os.environ):
        yield


def base(config, masters, chosen=None, prepare=lambda model: model):
    chosen = chosen or linears_and_experts() & skip_lm_head()
    return converted(prepare(plain()), replace(config, master_weights=masters), chosen)


def plain():
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = language_model("Qwen3Moe", None, **sizes, moe_intermediate_size=48, num_experts=4)
    model.set_experts_implementation("grouped_mm")
    return model


@both_formats
@both_masters
@pytest.mark.parametrize("adapts", (LINEAR, EXPERTS), ids=("linear", "experts"))
def test_an_adapter_comes_back(adapts, masters, config, tmp_path):
    model = base(config, masters)
    frozen, before = {name: x.clone() for name, x in model.state_dict().items()}, logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **adapts))
    losses(adapted, 2, 1e-2)
    assert all(p.any() for p in adapted.parameters() if p.requires_grad)
    expected = logits(adapted.eval())
    assert not torch.equal(expected, before)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(config, masters), tmp_path)
    assert_bitwise_equal(logits(again), expected)
    unloaded = again.unload()
    assert_bitwise_equal(logits(unloaded), before)
    assert_same_tensors(unloaded.state_dict(), frozen)


@both_formats
def test_experts_train_on_decoded_values(config):
    """Losses, gradients of adapters and merged weights of quantized experts are those of masters with their values."""
    # Linear layers stay plain: only what is adapted is quantized again.
    quantized, masters = base(config, False, experts()), base(config, True, experts())
    with torch.no_grad():
        for p, weight in zip(masters.parameters(), quantized.parameters(), strict=True):
            p.copy_(weight.dequantize() if isinstance(weight, QuantizedTensor) else weight)
    both = []
    for model in (quantized, masters):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **EXPERTS))
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        both.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.requires_grad)])
    assert len(both[0]) == 5
    assert_same(*both)


def q_proj(model):
    return model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith("q_proj")))


ORDERS = ("converted_first", "adapted_first", "frozen_first")


def adapted_model(order, config, masters, **adapts):
    lora = peft.LoraConfig(r=4, init_lora_weights=False, **(adapts or LINEAR))
    if order == "adapted_first":
        return base(config, masters, prepare=lambda model: peft.get_peft_model(model, lora))
    model = base(config, masters, prepare=lambda model: model.requires_grad_(order != "frozen_first"))
    return peft.get_peft_model(model, lora)


@both_formats
@both_masters
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("safe", (False, True), ids=("in_place", "safe"))
def test_merging_needs_no_word_more(config, masters, order, safe):
    """The sum of base and adapter is quantized as the base was, and so is the difference that unmerging leaves."""
    adapted = adapted_model(order, config, masters)
    layer = q_proj(adapted)
    weight = layer.get_base_layer().weight
    before, delta = weight.dequantize(), layer.get_delta_weight("default")
    adapted.merge_adapter(safe_merge=safe)
    merged = layer.get_base_layer().weight
    assert merged.config == replace(config, master_weights=masters) and isinstance(merged, torch.nn.Parameter)

    def stored(values):
        return values if masters else type(merged).from_hp(values).dequantize()

    assert_bitwise_equal(merged.dequantize(), stored(before + delta))
    values = merged.dequantize()
    adapted.unmerge_adapter()
    assert_bitwise_equal(layer.get_base_layer().weight.dequantize(), stored(values - delta))
    out = logits(adapted.merge_and_unload(safe_merge=safe))
    assert torch.isfinite(out).all()


@both_formats
@both_masters
def test_several_adapters_merge(config, masters):
    """Each is added in its turn, to the layers that it adapts."""
    adapted = peft.get_peft_model(base(config, masters), peft.LoraConfig(**LINEAR, init_lora_weights=False))
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    layers = {name: m for name, m in adapted.named_modules() if name.endswith(("q_proj", "o_proj"))}
    expected = {}
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight
        values = weight.dequantize()
        for adapter in layer.lora_A:
            values = values + layer.get_delta_weight(adapter)
            values = values if masters else type(weight).from_hp(values).dequantize()
        expected[name] = values
    adapted.merge_adapter(["default", "other"])
    assert sorted(len(layer.merged_adapters) for layer in layers.values()) == [1, 2]
    assert_same_tensors({name: m.get_base_layer().weight.dequantize() for name, m in layers.items()}, expected)
    adapted.unmerge_adapter()
    assert not any(layer.merged for layer in layers.values())


@both_formats
@pytest.mark.parametrize("safe", (False, True), ids=("in_place", "safe"))
def test_master_weights_merge_bit_for_bit_as_plain_ones(config, safe):
    """Also if the base is in bfloat16 and the adapter in float32, where it matters when a sum is rounded."""
    steps = []
    for model in (plain().bfloat16(), base(config, True, prepare=lambda model: model.bfloat16())):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **LINEAR))
        layer = q_proj(adapted)
        assert layer.lora_A["default"].weight.dtype is torch.float32
        adapted.merge_adapter(safe_merge=safe)
        merged = layer.get_base_layer().weight.detach().clone()
        adapted.unmerge_adapter()
        steps.append((merged, layer.get_base_layer().weight.detach().clone()))
    for expected, got in zip(*steps):
        assert_bitwise_equal(got.dequantize(), expected)


@both_formats
@pytest.mark.parametrize("safe", (False, True), ids=("in_place", "safe"))
def test_dora_merges_as_on_a_plain_base(config, safe):
    """By itself, and after plain LoRA."""
    lora = {"init_lora_weights": False, **LINEAR}
    weights = {}
    for name, model in (("plain", plain()), ("converted", base(config, True))):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(use_dora=True, **lora))
        adapted.add_adapter("other", peft.LoraConfig(**lora))
        layer, steps = q_proj(adapted), []
        for adapters in (["default"], ["other", "default"]):
            adapted.merge_adapter(adapters, safe_merge=safe)
            steps.append(layer.get_base_layer().weight.detach().clone())
            adapted.unmerge_adapter()
            steps.append(layer.get_base_layer().weight.detach().clone())
        weights[name] = steps
    assert not torch.allclose(weights["plain"][0], weights["plain"][1], rtol=0.1)
    for got, expected in zip(weights["converted"], weights["plain"], strict=True):
        assert_bitwise_equal(got.dequantize(), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_adapters_are_left_out_and_the_report_says_so(order):
    adapted = adapted_model(order, FP8, True)
    adapters = {name for name, m in adapted.named_modules() if isinstance(m, torch.nn.Linear) and ".lora_" in name}
    report = {layer.fqn: (layer.status, layer.reason) for layer in conversion_report(adapted).layers}
    assert len(adapters) == 4 and {report[name] for name in adapters} == {
        ("skipped", "PEFT adapter, kept in high precision")
    }
    assert all(type(adapted.get_submodule(name).weight) is torch.nn.Parameter for name in adapters)
    assert report["base_model.model.model.layers.0.self_attn.q_proj.base_layer"][0] == "converted"
    planned = dry_run(adapted, FP8, linears_and_experts() & skip_lm_head())
    assert planned.layers == conversion_report(adapted).layers


TUNERS = {
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LINEAR),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, total_step=10, **LINEAR),
    "loha": lambda: peft.LoHaConfig(r=4, **LINEAR),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, **LINEAR),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], **LINEAR),
    "prompt": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=64),
}


# Their layers call PEFT's `resolve_quantization_backend`, which needs to know how to quantize a merged weight.
BACKEND_TUNERS = {
    "oft": TUNERS["oft"],
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, **LINEAR),
    "vera": lambda: peft.VeraConfig(r=4, **LINEAR),
    "miss": lambda: peft.MissConfig(r=4, **LINEAR),
    "shira": lambda: peft.ShiraConfig(r=4, **LINEAR),
}


@pytest.mark.parametrize("tuner", TUNERS.values(), ids=TUNERS)
def test_what_other_tuners_add_is_left_out(tuner):
    model = plain()
    before = {id(p) for p in model.parameters()}
    adapted = converted(peft.get_peft_model(model, tuner()), FP8)
    added = [p for p in adapted.parameters() if id(p) not in before]
    assert added and not any(isinstance(p, MasterWeightTensor) for p in added)
    assert any(isinstance(p, MasterWeightTensor) for p in adapted.parameters())
    for layer in conversion_report(adapted).layers:
        assert layer.status == "converted" or "adapter" in layer.reason or ".mlp." in layer.fqn, layer
    adapted(input_ids=IDS, labels=IDS).loss.backward()


@both_formats
@both_masters
@pytest.mark.parametrize("tuner", BACKEND_TUNERS.values(), ids=BACKEND_TUNERS)
def test_tuners_that_look_up_a_quantization_backend_train_and_merge(tuner, masters, config):
    model = base(config, masters, prepare=lambda model: model.requires_grad_(False))
    adapted = peft.get_peft_model(model, tuner())
    losses(adapted, 2, 1e-2)
    kind = type(q_proj(adapted).get_base_layer().weight.data)
    before = q_proj(adapted).get_base_layer().weight.dequantize()
    merged = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert type(merged.data) is kind and merged.config == replace(config, master_weights=masters)
    assert not torch.equal(merged.dequantize(), before)


def test_lora_of_converted_layers_is_pickled_and_copied():
    layer = q_proj(adapted_model("converted_first", FP8, False))
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        twin.merge()
        assert twin.get_base_layer().weight.config == layer.get_base_layer().weight.config


def test_torchaos_own_tensors_merge_as_without_us():
    """A layer that another config of torchao quantized is asked as before."""
    from torchao.quantization import Int8WeightOnlyConfig

    model = base(FP8, True, lambda m, name: name.endswith("k_proj"))
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name.endswith("q_proj"))
    with pytest.warns(UserWarning, match="without `get_apply_tensor_subclass`"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    with pytest.raises(ValueError, match="get_apply_tensor_subclass"):
        q_proj(adapted).merge()


@both_formats
@both_masters
@pytest.mark.parametrize("assign", (False, True), ids=("in_place", "assigned"))
@pytest.mark.parametrize("frozen", (True, False), ids=("frozen", "training"))
def test_a_merge_into_the_values_of_a_weight(config, masters, assign, frozen):
    """As litgpt's LoRALinear merges."""
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(64, 64, bias=False)}).requires_grad_(not frozen)
    quantize_(model, replace(config, master_weights=masters))
    weight, delta = model["linear"].weight, torch.randn(64, 64) / 16
    before = weight.dequantize()
    if assign:
        weight.data = weight.data.clone().add_(delta)
    elif not (masters or frozen):
        with pytest.raises(NotImplementedError, match=r"linear\.weight: .*only to .*frozen.*MasterWeightOpt"):
            weight.data += delta
        return
    else:
        weight.data += delta
    assert model["linear"].weight is weight
    expected = before + delta if masters else type(weight).from_hp(before + delta).dequantize()
    assert_bitwise_equal(weight.dequantize(), expected)
    model["linear"](torch.randn(3, 64))


@both_formats
@pytest.mark.parametrize("masters", (True, False), ids=("masters", "frozen"))
def test_merging_into_experts(config, masters):
    """`w + b @ a` by `baddbmm`, which stays a weight; the GEMMs with it are in low precision."""
    model = adapted_model("converted_first", config, masters, **EXPERTS)
    expected = logits(model)
    merged = model.merge_and_unload()
    got = logits(merged)
    assert torch.equal(got, expected) if masters else torch.isfinite(got).all()
    stacks = [p for p in merged.parameters() if p.dim() == 3]
    assert len(stacks) == 2 and all(isinstance(p, (MasterWeightTensor, QuantizedTensor)) for p in stacks)


def test_merging_into_quantized_experts_that_train_is_refused():
    adapted = peft.get_peft_model(base(FP8, False), peft.LoraConfig(r=4, **EXPERTS)).requires_grad_(True)
    with pytest.raises(NotImplementedError, match=r"experts\.(gate_up|down)_proj.*master_weights=True"):
        adapted.merge_and_unload()
