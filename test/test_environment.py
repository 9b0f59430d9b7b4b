"""What lies outside the package and may be old, missing or broken: it is said in a sentence, where it matters."""

from __future__ import annotations

import subprocess
import sys

import pytest

NEEDS = "RuntimeError: torchao_blockwise needs torch 2.11 and torchao 0.17 or newer, got "
# PyTorch 2.9 has none of these.
OLD_TORCH = """
import torch, torchao
import torch.nn.functional as F
torch.__version__ = "2.9.1+cpu"
del F.ScalingType, F.SwizzleType, F.scaled_mm, torch._scaled_mm_v2
"""
OLD_TORCHAO = """
import torch, torchao
torchao.__version__ = "0.16.0"
"""
CONVERT = """
import torchao_blockwise
from torchao.quantization import quantize_
model = torch.nn.Linear(16, 16)
quantize_(model, torchao_blockwise.BlockwiseFP8TrainingConfig())
"""


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "got"), ((OLD_TORCH, "torch 2.9.1+cpu"), (OLD_TORCHAO, "torchao 0.16.0")))
@pytest.mark.parametrize("call", ("quantize_", "dry_run"))
def test_an_older_package_is_refused_at_conversion(old, got, call):
    convert = CONVERT.replace("quantize_(model", f"torchao_blockwise.{call}(model") if call == "dry_run" else CONVERT
    done = python(old + "import torchao_blockwise\nprint('imported')" + convert)
    assert done.stdout.strip() == "imported", done.stderr
    assert last_line(done).startswith(NEEDS) and got in last_line(done)
    assert last_line(done).endswith("pip install -U torch torchao")


def test_a_package_too_old_to_import_says_so():
    done = python(OLD_TORCH + "del torch._grouped_mm\nimport torchao_blockwise")
    assert last_line(done).startswith(NEEDS + "torch 2.9.1+cpu")


def test_what_cannot_be_imported_from_new_packages_is_no_matter_of_versions():
    assert "_grouped_mm" in last_line(python("import torch\ndel torch._grouped_mm\nimport torchao_blockwise"))


@pytest.mark.parametrize(
    "version", ("2.11.0", "2.13.0+cpu", "2.12.0a0+gitdeadbee", "2.11.0.dev20260101", "3.0", "main")
)
def test_newer_versions_and_those_that_say_nothing_convert(version, monkeypatch):
    import torch

    from torchao_blockwise import _compat_versions

    monkeypatch.setattr(torch, "__version__", version)
    assert _compat_versions.why_too_old() is None
