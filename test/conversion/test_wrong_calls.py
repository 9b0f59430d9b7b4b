"""Mistakes in calls of `quantize_`, `from_pretrained` and optimizers: the error says what to write instead."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
import torch
from helpers import FP8, NVFP4
from torch import nn
from torchao.quantization import quantize_

import torchao_blockwise
from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4TrainingConfig,
    dry_run,
    is_linear,
    recommended_layers,
)

CONFIGS = {BlockwiseFP8TrainingConfig: "BlockwiseFP8Config", NVFP4TrainingConfig: "NVFP4Config"}
every_config = pytest.mark.parametrize("config", CONFIGS)
FILTERS = {
    "is_linear": "is_linear()",
    "experts": "experts()",
    "linears_and_experts": "linears_and_experts()",
    "skip_routers": "skip_routers()",
    "skip_lm_head": "skip_lm_head()",
    "skip_fqns": "skip_fqns(patterns)",
    "min_features": "min_features(features)",
    "keep_last_blocks": "keep_last_blocks(model, count)",
    "recommended_layers": "recommended_layers(model, config)",
}


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))


@pytest.mark.parametrize("combined", (False, True), ids=("plain", "combined"))
@pytest.mark.parametrize(("name", "call"), FILTERS.items(), ids=FILTERS)
def test_a_filter_that_is_not_called(name, call, combined):
    filter_fn, model = getattr(torchao_blockwise, name), layers()
    filter_fn = filter_fn & is_linear() if combined else filter_fn
    said = rf"^{name}: called with a module and '.*', as filters are, .*; write filter_fn={re.escape(call)}$"
    for wrong in (lambda: quantize_(model, FP8, filter_fn=filter_fn), lambda: dry_run(model, FP8, filter_fn)):
        with pytest.raises(TypeError, match=said):
            wrong()
    assert not any(isinstance(p, MasterWeightTensor) for p in model.parameters())


@every_config
def test_quantize_takes_a_config_and_no_class(config):
    said = (
        rf"^quantize_: config must be a training config, got the class {config.__name__}; write {config.__name__}\(\)$"
    )
    with pytest.raises(TypeError, match=said):
        quantize_(layers(), config)


@every_config
@pytest.mark.parametrize("is_class", (False, True), ids=("config", "class"))
def test_quantize_takes_no_config_of_transformers(config, is_class):
    pytest.importorskip("transformers")
    wrong = getattr(importlib.import_module("torchao_blockwise.integrations.transformers"), CONFIGS[config])
    got = ("the class " if is_class else "") + wrong.__name__
    said = rf"^quantize_: config must be a training config, got {got}; write {config.__name__}\(\)$"
    with pytest.raises(TypeError, match=said):
        quantize_(layers(), wrong if is_class else wrong())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small plain model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).save_pretrained(folder)
    return folder


@every_config
@pytest.mark.parametrize("is_class", (False, True), ids=("config", "class"))
def test_from_pretrained_takes_its_own_configs(saved, config, is_class):
    import transformers

    got = f"the class {config.__name__}" if is_class else f"a {config.__name__}"
    said = rf"^from_pretrained: quantization_config must be {CONFIGS[config]}\(\) from .*\.transformers, got {got}; "
    with pytest.raises(AttributeError, match=said):
        transformers.AutoModelForCausalLM.from_pretrained(saved, quantization_config=config if is_class else config())
    assert not hasattr(config(), "quant_method")


@every_config
def test_from_pretrained_takes_no_class_of_its_configs(saved, config):
    transformers = pytest.importorskip("transformers")
    wrong = getattr(importlib.import_module("torchao_blockwise.integrations.transformers"), CONFIGS[config])
    with pytest.raises(AttributeError, match=rf"must be {wrong.__name__}\(\) .*, got the class {wrong.__name__}; "):
        transformers.AutoModelForCausalLM.from_pretrained(saved, quantization_config=wrong)


@every_config
@pytest.mark.parametrize("name", ("AdamW", "SGD", "Adagrad", "RMSprop", "Adamax"))
@pytest.mark.parametrize("foreach", (False, True))
def test_optimizers_of_quantized_parameters(config, name, foreach):
    model = layers()
    quantize_(model, config(master_weights=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=foreach)
    model(torch.randn(32, 64)).square().sum().backward()
    begins = "not exact on quantized data|a plain delta can be added"
    said = rf"({begins}).*step torchao_blockwise\.distributed\.MasterWeightOptimizer\(.*master_weights=True"
    with pytest.raises(NotImplementedError, match=said):
        optimizer.step()


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("outer", (lambda ddp: ddp, Wrapped), ids=("the model", "a part of it"))
def test_a_model_that_ddp_has_wrapped(outer):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(layers())
        with pytest.raises(ValueError, match=r"DistributedDataParallel holds its weight; convert the model first"):
            quantize_(outer(ddp), FP8)
        with pytest.raises(ValueError, match=r"before, and convert before DistributedDataParallel wraps the model"):
            quantize_(ddp.module, FP8)
    finally:
        dist.destroy_process_group()


# --- a plain quantize_(model, config) ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("options", ({}, {"filter_fn": None}), ids=("no filter", "None"))
def test_a_plain_call_warns_once_of_heads_and_routers(options):
    model = Model()
    assert warned(model, FP8, **options) == [
        "quantize_: without a filter it converts layers.1.router (router or gate), lm_head (output head); to leave "
        "these out, convert a fresh model with filter_fn=recommended_layers(model, config)"
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
