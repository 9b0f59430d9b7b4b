"""Other packages and folders that are old, missing or broken: a sentence says so where it matters."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torchao

from torchao_blockwise import _versions
from torchao_blockwise._compat import triton_launcher

NEEDS = "RuntimeError: torchao_blockwise needs torch 2.11 and torchao 0.17 or newer, got "
# PyTorch 2.9 has none of these.
OLD_TORCH = """
import torch, torchao
import torch.nn.functional as F
torch.__version__ = "2.9.1+cpu"
del F.ScalingType, F.SwizzleType, F.scaled_mm, torch._scaled_mm_v2
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


@pytest.mark.parametrize("name", ("cache", "file/cache", "."))
def test_kernels_are_kept_elsewhere_where_tritons_cache_cannot_be_written(name, tmp_path, monkeypatch):
    """A folder below a file, because permissions would not stop root. A new folder and an existing one are kept."""
    triton = pytest.importorskip("triton")
    from triton.runtime.cache import get_cache_manager

    (tmp_path / "file").write_text("")
    folder = str(tmp_path / name)
    monkeypatch.setattr(triton.knobs.cache, "dir", folder)
    triton_launcher.use_writable_cache.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            triton_launcher.use_writable_cache()
            path = get_cache_manager("0123").put(b"kernel", "kernel.bin")
    assert Path(path).read_bytes() == b"kernel"
    if name == "file/cache":
        (one,) = warned
        assert folder in str(one.message) and "set TRITON_CACHE_DIR to a folder that can be written" in str(one.message)
    else:
        assert not warned and path.startswith(folder)


@pytest.mark.gpu
def test_a_gpu_trains_without_a_cache_of_kernels(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    done = python(
        "import torch" + CONVERT.replace("Linear(16, 16)", "Linear(256, 384).cuda()") + "\n"
        "loss = model(torch.ones(64, 256, device='cuda')).square().mean()\nloss.backward()\n"
        "print(model.weight.grad.isfinite().all().item())"
    )
    assert done.stdout.strip() == "True", done.stderr
    assert done.stderr.count("Triton cannot cache kernels in") == 1


def test_an_older_package_is_refused_at_conversion():
    """By both ways to convert, of which the first one changes nothing; the import works."""
    plan = CONVERT.replace("quantize_(model", "torchao_blockwise.dry_run(model").replace("\n", "\n    ")
    plan = f"\ntry:{plan}\nexcept RuntimeError as e:\n    print(f'RuntimeError: {{e}}')"
    done = python(OLD_TORCH + "import torchao_blockwise\nprint('imported')" + plan + CONVERT)
    imported, planned = done.stdout.strip().splitlines()
    assert imported == "imported", done.stderr
    for line in (planned, last_line(done)):
        assert line.startswith(NEEDS + "torch 2.9.1+cpu") and line.endswith("pip install -U torch torchao")


def test_a_package_that_lacks_a_name_says_so_where_it_is_too_old():
    done = python(OLD_TORCH + "del torch._grouped_mm\nimport torchao_blockwise")
    assert last_line(done).startswith(NEEDS + "torch 2.9.1+cpu")
    assert "_grouped_mm" in last_line(python("import torch\ndel torch._grouped_mm\nimport torchao_blockwise"))


VERSIONS = ("2.11.0", "2.13.0+cpu", "2.12.0a0+gitdeadbee", "2.11.0.dev20260101", "3.0", "main")


def test_newer_versions_and_those_that_say_nothing_convert(monkeypatch):
    for version in VERSIONS:
        monkeypatch.setattr(torch, "__version__", version)
        assert _versions.why_too_old() is None, version
    monkeypatch.setattr(torchao, "__version__", "0.16.0")
    assert "torchao 0.16.0; pip install -U" in _versions.why_too_old()


def test_an_import_prints_nothing():
    """Not that torchao's own kernels fit no such PyTorch, nor that it registers an enum in an old way."""
    assert python("import torchao_blockwise").stderr == ""
