"""Modules around a model, or around a part of it, do not change the names in files."""

import json

import pytest
import torch
from exported_models import export, language_model
from helpers import FP8, NVFP4, assert_same_tensors, mlp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune

from torchao_blockwise import checkpoint, ops
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.testing import assert_bitwise_equal

CONFIGS = {"fp8_block": FP8, "nvfp4_compressed_tensors": NVFP4}


class Around(nn.Module):
    """A program's own class."""

    def __init__(self, model):
        super().__init__()
        self.backbone = model


def blocks(wrap, mlps=False):
    """`wrap` around each of the blocks, or around their MLPs."""

    def made(model):
        for i, layer in enumerate(model.model.layers):
            if mlps:
                layer.mlp = wrap(layer.mlp)
            else:
                model.model.layers[i] = wrap(layer)
        return model

    return made


def sharded(model):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


WRAPPERS = {
    "torch.compile": torch.compile,
    "torch.compile of blocks": blocks(torch.compile),
    "torch.compile of MLPs": blocks(torch.compile, mlps=True),
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper of blocks": blocks(checkpoint_wrapper),
    "torch.compile of checkpointed blocks": blocks(lambda block: torch.compile(checkpoint_wrapper(block))),
    "a class": Around,
    "a compiled class around compiled blocks": lambda model: torch.compile(Around(blocks(torch.compile)(model))),
    "DDP": nn.parallel.DistributedDataParallel,
    "a class around DDP": lambda model: Around(nn.parallel.DistributedDataParallel(model)),
    "torch.compile of FSDP2": lambda model: torch.compile(sharded(model)),
    "a class around FSDP2": lambda model: Around(sharded(model)),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("format", CONFIGS)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_are_those_of_the_model(wrap, format, tmp_path):
    """Tied embeddings, and layers that share a tensor scale."""
    expected = export(language_model("Qwen3", CONFIGS[format]), tmp_path / "bare", format)
    model = wrap(language_model("Qwen3", CONFIGS[format]))
    assert_same_tensors(export(model, tmp_path / "out", format), expected)
    settings = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("bare", "out")]
    assert settings[0] == settings[1]
    weights = checkpoint.quantized_weights(model, format)
    assert weights.metadata().keys() == expected.keys()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(model, tmp_path / "bare")
    assert_same_tensors({name: x.detach().contiguous() for name, x in weights}, expected)


def test_a_class_with_weights_of_its_own_is_exported_as_it_is():
    model = Around(language_model("Llama"))
    model.value = nn.Linear(192, 1)
    names = checkpoint.quantized_weights(model).metadata()
    assert "value.weight" in names and "backbone.lm_head.weight" in names


def test_adapters_that_are_not_merged():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(language_model("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    for call in (
        checkpoint.quantized_weights,
        lambda m: checkpoint.export(m, "out"),
        lambda m: checkpoint.load(m, "in"),
    ):
        for given in (model, model.get_base_model(), torch.compile(model)):
            with pytest.raises(ValueError, match=r"PEFT adapters that are not merged.*merge_and_unload"):
                call(given)


DERIVED = {
    "parametrized": (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.remove(layer, "weight"),
    ),
}


@pytest.mark.parametrize(("derive", "remove"), DERIVED.values(), ids=DERIVED)
def test_weights_that_are_computed_from_parameters(derive, remove):
    """Files hold what a GEMM reads, which is not the Parameter."""
    model = mlp(FP8)
    derive(model[0])
    for call in (checkpoint.quantized_weights, lambda m: checkpoint.export(m, "out")):
        with pytest.raises(ValueError, match=r": 0 is parametrized or pruned.*remove"):
            call(model)
    read = ops.quantize(model[0].weight.hp, FP8_128X128).rowwise.qdata
    remove(model[0])
    assert_bitwise_equal(dict(checkpoint.quantized_weights(model))["0.weight"], read)
