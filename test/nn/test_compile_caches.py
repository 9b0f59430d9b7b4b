"""Inductor's caches on disk: a process finds graphs of its recipe and of this very package, and no others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import cached_graphs
from cached_graphs import CASES, RECIPES

import torchao_blockwise

PACKAGE = Path(torchao_blockwise.__file__).parent


def run(cache: Path, *recipes: str, root: Path = PACKAGE.parent) -> dict:
    """Return the results of a new process that imports the package from `root`."""
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, cached_graphs.__file__, *recipes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def first(cache) -> dict:
    return run(cache, "fp8")


@pytest.fixture(scope="module")
def later(cache, first) -> dict:
    """A later process with the same folder: every other recipe, which takes no graph of another, and the first one."""
    return run(cache, *(recipe for recipe in RECIPES if recipe != "fp8"), "fp8")


# PyTorch finds no tensor parallel graph of another process, of plain layers neither.
@pytest.mark.parametrize("case", [case for case in CASES if case != "tensor_parallel"])
def test_the_same_recipe_finds_its_graphs(case, first, later):
    (hits, _), (hits_later, _) = first["fp8"][case], later["fp8"][case]
    assert hits_later > hits


def test_another_version_of_the_package_finds_none(cache, first, tmp_path):
    """Operations are known by name: an old graph would go on with shapes and strides of the old ones."""
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "__init__.py", "a") as source:
        source.write('__version__ += ".another"\n')
    assert run(cache, "fp8", root=tmp_path) == first
