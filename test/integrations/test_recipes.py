"""What frameworks share: names of recipes, packages that are wanted, scopes of callbacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import FP8, NVFP4, mlp
from torch import nn

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise.conversion.recommended import recommended
from torchao_blockwise.integrations import recipes


def test_names_of_recipes():
    assert recipes.training_config("fp8") == BlockwiseFP8TrainingConfig()
    assert recipes.training_config("nvfp4") == NVFP4TrainingConfig()
    assert recipes.training_config(FP8) is FP8
    with pytest.raises(ValueError, match=r"one of \['fp8', 'nvfp4'\], got 'nvpf4'; did you mean 'nvfp4'\?"):
        recipes.training_config("nvpf4")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        recipes.training_config("xyz")
    with pytest.raises(
        TypeError, match=r"got the class BlockwiseFP8TrainingConfig; write BlockwiseFP8TrainingConfig\(\)"
    ):
        recipes.training_config(BlockwiseFP8TrainingConfig)


class Stack(nn.Module):
    def __init__(self, count: int, kind=nn.ModuleList):
        super().__init__()
        blocks = [mlp(features=(32, 32, 32)) for _ in range(count)]
        self.layers = kind(blocks if kind is nn.ModuleList else {str(i): block for i, block in enumerate(blocks)})


def kept(model: nn.Module, config, count=None) -> set[str]:
    """The blocks of which nothing is converted."""
    chosen = recommended(model, config, last_blocks=count)
    return {fqn.split(".")[1] for fqn, m in model.named_modules() if isinstance(m, nn.Linear) and not chosen(m, fqn)}


@pytest.mark.parametrize("kind", (nn.ModuleList, nn.ModuleDict))
def test_nvfp4_keeps_the_last_blocks_as_its_recipe_says(kind):
    """15 %, rounded up; what is asked for where something is, and nothing of one block."""
    assert kept(Stack(7, kind), NVFP4) == {"5", "6"}
    assert kept(Stack(2, kind), NVFP4) == {"1"}
    assert kept(Stack(1, kind), NVFP4) == kept(mlp(), NVFP4) == kept(Stack(7, kind), FP8) == set()
    assert kept(Stack(7, kind), NVFP4, 0) == set()
    assert kept(Stack(7, kind), NVFP4, 1) == kept(Stack(7, kind), FP8, 1) == {"6"}
    model = Stack(7, kind)
    recipes.convert(model, NVFP4)
    assert [hasattr(block[0].weight, "hp") for block in model.layers.children()] == [True] * 5 + [False] * 2


def test_a_model_with_nothing_to_convert():
    with pytest.raises(ValueError, match="Embedding: no layer was converted"):
        recipes.convert(nn.Embedding(4, 4), FP8)


def test_packages_that_are_wanted():
    recipes.require("torch", (2, 11))
    with pytest.raises(ImportError, match=r"needs torch>=99\.0, got .*; pip install -U 'torch>=99\.0'"):
        recipes.require("torch", (99, 0))
    with pytest.raises(ImportError, match=r"needs no_such_package>=1\.0; pip install 'no_such_package>=1\.0'"):
        recipes.require("no_such_package", (1, 0))


@pytest.mark.parametrize("name", ("transformers", "lightning"))
def test_a_missing_package_is_named(name):
    code = f"""
import sys
sys.modules[{name!r}] = None
try:
    import torchao_blockwise.integrations.{name}
except ImportError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"torchao_blockwise.integrations.{name} needs {name}>="), done.stderr


def test_a_scope_is_entered_once_and_left_once():
    model, scope = mlp(FP8), recipes.OpenScope("rowwise")
    scope.leave()
    scope.enter(model)
    scope.enter(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed inside the scope"):
        scope.leave()
    scope.leave()
    scope.enter(model)
    scope.leave()
