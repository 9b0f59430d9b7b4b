"""Layers that cannot be converted, and mistakes in calls: the error says what to write instead, nothing is changed."""

import importlib
import importlib.util
import pickle
import warnings
import weakref

import pytest
import torch
from expert_modules import Model as ExpertModel
from expert_modules import kinds
from helpers import FP8, NVFP4, Tied, both_masters, converted, mlp, replace
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import prune
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4TrainingConfig,
    dry_run,
    experts,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    min_features,
    recommended_layers,
    skip_fqns,
    skip_lm_head,
)
from torchao_blockwise.conversion import convert_module


class OwnParameter(nn.Parameter):
    pass


def changed(layer, change):
    """The layer holds the result of `change`."""
    layer.held = change(layer)
    return layer


def changed_experts(change):
    return lambda: changed(ExpertModel().layers[0].experts, change)


def own_parameter(layer):
    name = "weight" if isinstance(layer, nn.Linear) else "down"
    setattr(layer, name, OwnParameter(getattr(layer, name).data))


def fake_quantized():
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    return FakeQuantizedLinear(64, 64, weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32))


def int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return converted(nn.Linear(64, 64), Int8WeightOnlyConfig())


def derived():
    layer = fake_quantized()
    layer.__class__ = type("Mine", (type(layer),), {"forward": lambda self, x: type(layer).forward(self, x)})
    return layer


def float8():
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(nn.Linear(64, 64))


def of(module: str, name: str, **options):
    return lambda: getattr(pytest.importorskip(module), name)(64, 64, **options)


class Registered(nn.Linear):
    def __init_subclass__(cls, *, name, **options):
        super().__init_subclass__(**options)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


QUANTIZED = replace(FP8, master_weights=False)
ITSELF = r"{} of {}\..* quantizes its weight itself"
FAILURES = {
    "complex": (lambda: nn.Linear(64, 64, dtype=torch.complex64), "its weight is torch.complex64; cast it to bfloat16"),
    "lazy": (lambda: nn.LazyLinear(64), "its weight is not initialized yet; run one forward pass first"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), r"a Parameter \(.*; convert"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(64, 64), "weight", amount=0.5), r"not a Parameter \("),
    "own parameter": (lambda: changed(nn.Linear(64, 64), own_parameter), "a OwnParameter; convert before sharding"),
    "no linear": (lambda: nn.Conv1d(4, 4, 1), "a Conv1d is not an nn.Linear and has no expert weights"),
    "quantized": (lambda: convert_module(nn.Linear(64, 64), QUANTIZED), "already a BlockwiseFP8Tensor; call unconvert"),
    "weak reference": (lambda: changed(nn.Linear(64, 64), lambda m: weakref.ref(m.weight)), "a weak reference to its"),
    "view": (lambda: changed(nn.Linear(64, 64), lambda m: m.weight.t()), "a view, the autograd graph of .* refers"),
    "forward": (lambda: changed(nn.Linear(64, 64), lambda m: vars(m).update(forward=lambda x: x)), "replaced on the"),
    "class": (lambda: type("L", (Registered,), {}, name="L")(64, 64), r"no class can be derived from L .*'name'"),
    "attention": (lambda: nn.MultiheadAttention(64, 2).out_proj, "nn.MultiheadAttention reads its weight without"),
    "experts, double": (changed_experts(lambda m: m.double() and None), r"up: its weight is torch.float64; cast it to"),
    "experts, weak": (changed_experts(lambda m: weakref.ref(m.down)), "down: something holds a weak reference to its"),
    "experts, view": (changed_experts(lambda m: m.down.mT), "down: a view, the autograd graph of"),
    "experts, own": (changed_experts(own_parameter), "down: its weight is not a plain .* a OwnParameter;"),
    "experts, quantized": (changed_experts(lambda m: convert_module(m, QUANTIZED) and None), "up: .* already a .*; "),
    # Layers that quantize by themselves.
    "qat": (lambda: qat.Linear(64, 64, qconfig=get_default_qat_qconfig()), ITSELF.format("Linear", r"torch\.ao")),
    "float8": (float8, ITSELF.format("Float8Linear", "torchao")),
    "fake quantized": (fake_quantized, ITSELF.format("FakeQuantizedLinear", "torchao")),
    "derived": (derived, ITSELF.format("FakeQuantizedLinear", "torchao")),
    "fp8 of transformers": (of("transformers.integrations.finegrained_fp8", "FP8Linear", block_size=(32, 32)),
                            "its weight is torch.float8_e4m3fn, and its scales are stored in another tensor"),
    "bitnet": (of("transformers.integrations.bitnet", "AutoBitLinear"), ITSELF.format("AutoBitLinear", "transformers")),
    "8 bits": (of("bitsandbytes.nn", "Linear8bitLt"), ITSELF.format("Linear8bitLt", "bitsandbytes")),
    "int8": (int8, "a (Int8|AffineQuantized)Tensor; convert before .* or quantizing it"),
    "4 bits": (of("bitsandbytes.nn", "Linear4bit"), ITSELF.format("Linear4bit", "bitsandbytes")),
}  # fmt: skip


def state(model):
    """All that a conversion may touch: modules, parameter objects, types, bits and hooks."""
    return (
        [
            (name, id(m), type(m), len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks))
            for name, m in model.named_modules()
        ],
        [(name, id(p), type(p), p.requires_grad) for name, p in model.named_parameters()],
        # The Parameters themselves: a pickle names the memory, and values that a state dict decodes are a copy.
        {n: pickle.dumps(v) for n, v in model.named_parameters() if not isinstance(v, nn.UninitializedParameter)},
    )


@pytest.mark.parametrize(("make", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_failing_conversion_names_the_layer_and_changes_nothing(make, reason):
    """As the dry run foretells; without that layer the others are converted."""
    block = nn.Sequential(nn.ReLU(), make())
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "block": block, "last": nn.Linear(64, 64)})
    before = state(model)
    wanted = lambda m, fqn: fqn in ("first", "block.1", "last")  # noqa: E731
    remedy = r"nothing was changed; fix them, or exclude them with filter_fn=skip_fqns\(...\):"
    said = f"^quantize_: 1 of 3 layers cannot be converted, so {remedy}\n  block.1: .*{reason}"
    with pytest.raises(ValueError, match=said):
        quantize_(model, FP8, wanted)
    assert state(model) == before
    foretold = {row.status for row in dry_run(model, FP8, wanted).layers if row.fqn.startswith("block")}
    assert foretold <= {"cannot convert"}
    quantize_(model, FP8, skip_fqns("block.*"))
    assert type(model["first"].weight) is type(model["last"].weight) is MasterWeightTensor


def test_converting_while_a_graph_is_alive_changes_nothing():
    model = mlp(FP8)
    out, before = model(torch.randn(3, 64)), state(model)
    with pytest.raises(ValueError, match="2 of 2 layers cannot be converted"):
        quantize_(model, NVFP4)
    assert state(model) == before
    out.sum().backward()
    del out
    quantize_(model, NVFP4)


def test_quantized_parameters_are_not_shared_with_other_modules():
    """An embedding cannot look rows up in one: refused before any change, and foretold by the dry run."""
    reasons = [row.reason for row in dry_run(Tied(), QUANTIZED).layers if row.status == "cannot convert"]
    assert len(reasons) == 1 and "shared with another module, Embedding" in reasons[0]
    convolution = ExpertModel()
    convolution.conv.weight = convolution.layers[0].experts.up
    for model, kind in ((Tied(), "Embedding"), (convolution, "Conv1d")):
        with pytest.raises(ValueError, match=f"another module, {kind}, which cannot use a quantized tensor"):
            quantize_(model, QUANTIZED, is_linear() | experts())
        assert kinds(model) == {}


CONFIGS = {BlockwiseFP8TrainingConfig: "BlockwiseFP8Config", NVFP4TrainingConfig: "NVFP4Config"}
every_config = pytest.mark.parametrize("config", CONFIGS)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))


def test_a_filter_that_is_not_called():
    makes = is_linear, skip_fqns, min_features, keep_last_blocks, recommended_layers
    for make in (*makes, recommended_layers & is_linear()):
        model = layers()
        with pytest.raises((TypeError, ValueError)):
            quantize_(model, FP8, filter_fn=make)
        assert kinds(model) == {}


def of_transformers(config):
    pytest.importorskip("transformers")
    return getattr(importlib.import_module("torchao_blockwise.integrations.transformers"), CONFIGS[config])


def test_a_training_config_is_wanted_and_no_class():
    calls = {
        "quantize_": quantize_,
        "dry_run": dry_run,
        "recommended_layers": lambda model, config: quantize_(model, FP8, recommended_layers(model, config)),
    }
    for config in CONFIGS:
        wrong = {f"the class {config.__name__}": config}
        if importlib.util.find_spec("transformers"):
            theirs = of_transformers(config)
            wrong |= {theirs.__name__: theirs(), f"the class {theirs.__name__}": theirs}
        for got, given in wrong.items():
            for name, call in calls.items():
                said = rf"^{name}: config must be a training config, got {got}; use {config.__name__}\(\)$"
                with pytest.raises(TypeError, match=said):
                    call(layers(), given)
    with pytest.raises(TypeError, match=r"got str; use BlockwiseFP8TrainingConfig\(\) or NVFP4TrainingConfig\(\)"):
        dry_run(layers(), "fp8")
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got a BlockwiseFP8TrainingConfig$"):
        recommended_layers(FP8)


@every_config
def test_from_pretrained_takes_its_own_configs_and_no_class(config, tmp_path):
    transformers, theirs = pytest.importorskip("transformers"), of_transformers(config)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path)
    wrong = {f"a {config.__name__}": config(), f"the class {config.__name__}": config}
    wrong["a Derived"] = type("Derived", (config,), {})()
    for got, given in {**wrong, f"the class {theirs.__name__}": theirs}.items():
        said = (
            rf"^from_pretrained: quantization_config must be {theirs.__name__}\(\) from .*\.transformers "
            rf"\(with the same options\), got {got}; "
        )
        with pytest.raises(AttributeError, match=said):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=given)
    assert not hasattr(config(), "quant_method")


@pytest.mark.parametrize("config", [FP8, NVFP4], ids=("fp8", "nvfp4"))
def test_the_loader_of_diffusers_is_refused(config):
    """It calls `quantize_` for one linear layer after the other, as does this function with the name of its module."""
    names = {"__name__": "diffusers.quantizers.torchao.torchao_quantizer", "quantize_": quantize_}
    exec("def create_quantized_param(module, config): quantize_(module, config)", names)
    layer = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"TorchAoConfig .* load the model without it, and call quantize_"):
        names["create_quantized_param"](layer, config)
    assert type(layer.weight) is nn.Parameter


def test_a_model_that_ddp_has_wrapped(one_rank):
    ddp = nn.parallel.DistributedDataParallel(layers())
    for model in (ddp, nn.Sequential(ddp), ddp.module):
        with pytest.raises(ValueError, match=r"DistributedDataParallel refers to its weight; .* before DDP"):
            quantize_(model, FP8)


class Model(nn.Module):
    """Two blocks, the second with a router that is a linear layer, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([layers(), nn.ModuleDict({"up": nn.Linear(64, 64), "router": nn.Linear(64, 4)})])
        self.lm_head = nn.Linear(64, 16)


def warned(model, config, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(model, config, **options)
    return [str(w.message) for w in caught if "recommended_layers" in str(w.message)]


def test_a_plain_call_warns_once_of_heads_and_routers():
    for options in ({}, {"filter_fn": None}):
        model = Model()
        assert warned(model, FP8, **options) == [
            "quantize_: without a filter, these layers are converted, too: layers.1.router (router or gate), lm_head "
            "(output head); to leave them out, convert a new model with filter_fn=recommended_layers(model, config)"
        ]
        assert isinstance(model.lm_head.weight, MasterWeightTensor)


def test_a_plain_call_warns_of_the_last_blocks_in_nvfp4():
    model = nn.ModuleDict({"layers": nn.ModuleList(layers() for _ in range(14))})
    (text,) = warned(model, NVFP4)
    assert "layers.11.0 (keep_last_blocks: in the last 3 blocks), " in text and " and 3 more; to leave" in text


def test_what_is_recommended_is_no_reason_to_warn():
    assert warned(nn.ModuleDict({"layers": nn.ModuleList(layers() for _ in range(14))}), FP8) == []
    assert warned(layers(), NVFP4) == []
    assert warned(Model(), FP8, filter_fn=is_linear()) == []
    model = Model()
    assert warned(model, NVFP4, filter_fn=recommended_layers(model, NVFP4)) == []


# --- models that multiply by weights themselves -----------------------------------------------------------------------

IDS = torch.arange(34).view(2, 17)


def language_model(family: str, **options) -> nn.Module:
    pytest.importorskip("transformers", "5.0")
    import exported_models

    return exported_models.language_model(family, None, **options)


@both_masters
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
