"""The programs of docs/examples, and tutorials that train in frameworks, run offline, and their losses fall."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NEEDS = {
    "examples/accelerate_loop.py": ("transformers", "accelerate"),
    "examples/lightning_module.py": ("lightning",),
    # The site runs all tutorials; these use frameworks whose versions change.
    "tutorials/trainer.py": ("transformers", "accelerate"),
    "tutorials/lora.py": ("transformers", "peft"),
}


def test_every_example_is_run():
    assert {file.name for file in (DOCS / "examples").glob("*.py")} <= {Path(name).name for name in NEEDS}


@pytest.mark.parametrize("name", NEEDS)
def test_it_trains(name, tmp_path):
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    root = str(DOCS.parent)
    environment = os.environ | {"PYTHONPATH": root, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(DOCS / name)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < 0.9 * first
    assert not list(tmp_path.iterdir()), "it left files behind"
