"""Helpers that integrations share: names of recipes, required packages, scopes of callbacks."""

import importlib
import sys
import warnings

import pytest
import torch
from expert_modules import EXPERTS, Model, accepted
from helpers import FP8, NVFP4, mlp
from torch import nn

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, _versions, recipe_state
from torchao_blockwise.integrations import options, recipes


def test_names_of_recipes():
    assert recipes.training_config("fp8") == BlockwiseFP8TrainingConfig()
    assert recipes.training_config("nvfp4") == NVFP4TrainingConfig()
    assert recipes.training_config(FP8) is FP8
    with pytest.raises(ValueError, match=r"one of \['fp8', 'nvfp4'\], got 'nvpf4'; did you mean 'nvfp4'\?"):
        recipes.training_config("nvpf4")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        recipes.training_config("xyz")
    with pytest.raises(
        TypeError, match=r"got the class BlockwiseFP8TrainingConfig; use BlockwiseFP8TrainingConfig\(\)"
    ):
        recipes.training_config(BlockwiseFP8TrainingConfig)


ATTENTION = ["layers.0.attention", "layers.1.attention"]
# {what: (options, the layers that are selected)}
SELECTED = {
    "default": ({}, EXPERTS + ATTENTION),
    "no experts": ({"experts": False}, ATTENTION),
    "head": ({"lm_head": True, "experts": False}, [*ATTENTION, "lm_head"]),
    "include": ({"include": ["layers.0.*", "lm_head"]}, [EXPERTS[0], ATTENTION[0]]),
    "exclude": ({"exclude": ["*.experts", "layers.0.attention"]}, ATTENTION[1:]),
    "large": ({"min_features": 65}, []),
    "last blocks": ({"keep_last_blocks": 1}, [EXPERTS[0], ATTENTION[0]]),
    "all blocks": ({"keep_last_blocks": 0}, EXPERTS + ATTENTION),
}


@pytest.mark.parametrize(("given", "names"), SELECTED.values(), ids=SELECTED)
def test_what_options_select(given, names):
    model = Model()
    config, selection = options.parse("fp8", {**given, "out_dtype": "bfloat16", "fuse": True})
    assert config == BlockwiseFP8TrainingConfig(out_dtype=torch.bfloat16) and selection.fuse
    assert sorted(accepted(selection.filter_for(model, config), model)) == sorted(names)


WRONG_OPTIONS = {
    "name": ({"exlude": ["*"]}, ValueError, "fp8: options are backend, exclude, .*; got 'exlude'; did you mean 'excl"),
    "masters": ({"master_weights": False}, ValueError, "got 'master_weights'; leave it out"),
    "string": ({"include": "layers.0.*"}, TypeError, "include: must be a list of patterns, got 'layers"),
    "pattern": ({"exclude": ["layers.9.*"]}, ValueError, "'layers.9.*' matches no linear layer and no .* 'lm_head'"),
    "value": ({"out_dtype": "bfloat61"}, ValueError, "out_dtype must be"),
}


@pytest.mark.parametrize(("given", "error", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options(given, error, message):
    with pytest.raises(error, match=message):
        config, selection = options.parse("fp8", given)
        selection.filter_for(Model(), config)
    with pytest.raises(ValueError, match=r"format must be one of \['fp8', 'nvfp4'\], got 'fp4'; did you mean 'nvfp4'"):
        options.parse("fp4", given)


def test_conversion_by_the_default_filter():
    model = nn.ModuleList(mlp(features=(32, 32, 32)) for _ in range(7))
    recipes.convert(model, NVFP4)
    assert [hasattr(block[0].weight, "hp") for block in model] == [True] * 5 + [False] * 2
    with warnings.catch_warnings():
        # The error says it.
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="Embedding: none of the 0 linear layers and experts was converted"):
            recipes.convert(nn.Embedding(4, 4), FP8)


def test_packages_that_are_wanted():
    _versions.require("torch", (2, 11))
    with pytest.raises(ImportError, match=r"needs torch>=99\.0, got .*; pip install -U 'torch>=99\.0'"):
        _versions.require("torch", (99, 0))
    with pytest.raises(ImportError, match=r"needs no_such_package>=1\.0; pip install 'no_such_package>=1\.0'"):
        _versions.require("no_such_package", (1, 0))


@pytest.mark.parametrize("name", ("transformers", "lightning"))
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"torchao_blockwise.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^torchao_blockwise\.integrations\.{name} needs {name}>="):
        importlib.import_module(f"torchao_blockwise.integrations.{name}")


def test_a_rank_that_resumes_keeps_its_seed():
    """Each rank continues from the state that one rank has saved, by its own seed, at the same use."""
    saved = recipe_state(mlp(NVFP4TrainingConfig(seed=1)))
    model = mlp(NVFP4TrainingConfig(seed=2))
    recipes.resume_recipe(model, {name: {**state, "use": 5} for name, state in saved.items()})
    assert {(state["seed"], state["use"]) for state in recipe_state(model).values()} == {(2, 5)}
