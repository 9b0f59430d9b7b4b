"""Files of earlier versions load, bit for bit; `write.py` writes the files of a release.

An option that is gone is ignored at its default; a file that has another value is refused, with what to do instead.
"""

import contextlib
import dataclasses
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import NVFP4
from torch import nn
from torchao.core.config import config_from_dict

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import write

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, checkpoint, load_recipe_state
from torchao_blockwise.integrations.options import parse
from torchao_blockwise.tensors import config as configs
from torchao_blockwise.testing import sqnr

HERE = Path(__file__).parent


def each(pattern: str):
    files = sorted(HERE.glob(f"[0-9]*/{pattern}"))
    assert files, pattern
    return pytest.mark.parametrize("file", files, ids=[f"{file.relative_to(HERE)}" for file in files])


def refused(options: dict):
    for name, (default, instead) in configs.REMOVED.items():
        if options.get(name, default) != default:
            return pytest.raises(ValueError, match=rf"Config: {name}=.* was removed; {re.escape(instead)}")
    return contextlib.nullcontext()


def of_version(file: Path, config):
    """`config` as the version that wrote the file had it, which had no other blocks in 0.1.0."""
    is_older = isinstance(config, BlockwiseFP8TrainingConfig) and "0.1.0" in file.parts
    return dataclasses.replace(config, **configs.VERSION_1) if is_older else config


def digests_of(file: Path) -> dict[str, str]:
    return json.loads((file.parent / "digests.json").read_text())[file.stem if file.suffix == ".pt" else file.name]


def of_transformers(data: dict):
    pytest.importorskip("transformers", "5.0")
    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config

    (kind,) = (kind for kind in (BlockwiseFP8Config, NVFP4Config) if kind.method == data["quant_method"])
    return kind.from_dict(data).training_config


READERS = {
    "pickle": lambda file, data: pickle.loads(file.with_suffix(".pickle").read_bytes()),
    "torch": lambda file, data: torch.load(file.with_suffix(".pt"), weights_only=True),
    "torchao": lambda file, data: config_from_dict(data["torchao"]),
    "transformers": lambda file, data: of_transformers(data["transformers"]),
}


@each("configs/*.json")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_configs(file, read):
    data = json.loads(file.read_text())
    recipe, options = data["recipe"], data["options"]
    if read is READERS["torchao"] and "torchao" not in data:
        pytest.skip("torchao writes no tuples")
    with refused(options):
        assert read(file, data) == of_version(file, write.config(recipe, options))


@each("model-*.pt")
def test_models(file):
    recipe, name = file.stem.split("-")[1:]
    options = json.loads((file.parent / "configs" / f"{recipe}-{name.split('_quantized')[0]}.json").read_text())
    with refused(options["options"]):
        model = torch.load(file, weights_only=False)
        assert write.digests(write.state_of(model)) == digests_of(file)
        x, layer = torch.randn(32, 16, dtype=torch.bfloat16), model["q_proj"]
        y, values = layer(x), model.state_dict()["q_proj.weight"]
        assert sqnr(y, nn.functional.linear(x, values, layer.bias)) > 15
        y.sum().backward()


@each("weights.pt")
def test_parameters(file):
    loaded = torch.load(file, weights_only=True)
    assert write.digests(loaded) == digests_of(file)
    for name, made in write.weights().items():
        assert type(loaded[name]) is type(made) and loaded[name].requires_grad == made.requires_grad
        assert loaded[name].dtype == made.dtype
        assert getattr(loaded[name], "config", None) == of_version(file, made.config)


@each("state-*.pt")
def test_state_dicts(file):
    _, recipe, *quantized = file.stem.split("-")
    state = torch.load(file, weights_only=True)
    model = write.model(recipe, {}, master_weights=not quantized)
    model.load_state_dict(state["model"])
    load_recipe_state(model, state["recipe"])
    assert write.digests(write.state_of(model)) == digests_of(file)


@each("optimizer-*.pt")
def test_optimizers(file):
    saved = torch.load(file, weights_only=True)
    model, optimizer = write.trained(file.stem.split("-")[1])
    optimizer.step()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert write.digests([dict(model.named_parameters()), optimizer.model_state_dict()]) == digests_of(file)
    again = optimizer.state_dict()
    assert write.digests(again["state"]) == write.digests(saved["optimizer"]["state"])


@each("dcp")
def test_distributed_checkpoints(file):
    model = zeroed(write.model("nvfp4", {}))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=file, no_dist=True)
    model.load_state_dict(state["model"])
    assert write.digests(dict(model.named_parameters())) == digests_of(file)


@each("*/model.safetensors")
def test_exports(file):
    folder = file.parent
    model = write.attention(*write.FORMATS[folder.name])
    checkpoint.load(zeroed(model), folder)
    assert write.digests(dict(model.named_parameters())) == digests_of(folder)


def zeroed(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    return model


@each("pretrained-*.json")
def test_a_saved_model_of_transformers(file, tmp_path):
    transformers = pytest.importorskip("transformers", "5.0")
    recipe = file.stem.split("-")[1]
    of_transformers(json.loads(file.read_text())["quantization_config"])
    write.llama().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(file.read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.model.layers[0].self_attn.q_proj.weight.config == of_version(file, write.config(recipe, {}))


REFUSED = "rounding='up' was removed; take seed"
CALLS = {
    "config": lambda value: NVFP4TrainingConfig(rounding=value),
    "of fp8": lambda value: BlockwiseFP8TrainingConfig(rounding=value),
    "replace": lambda value: dataclasses.replace(NVFP4, rounding=value),
    "torchao": lambda value: config_from_dict({"_type": "NVFP4TrainingConfig", "_data": {"rounding": value}}),
    "state": lambda value: object.__new__(NVFP4TrainingConfig).__setstate__({"seed": 1, "rounding": value}),
    "trainer": lambda value: parse("nvfp4", {"rounding": value}),
    "transformers": lambda value: of_transformers({"quant_method": "blockwise_nvfp4", "rounding": value}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_option_that_is_gone(call, monkeypatch):
    monkeypatch.setitem(configs.REMOVED, "rounding", ("down", "take seed"))
    call("down")
    with pytest.raises(ValueError, match=REFUSED):
        call("up")
