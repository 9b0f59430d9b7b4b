"""Shared set-up: on a machine without a GPU, Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

# Tests share test/helpers.py, in spawned processes too.
sys.path.append(str(Path(__file__).parent))

if not torch.cuda.is_available():
    # Before anything imports Triton, which reads it once.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads of several would wait for each other.
    torch.set_num_threads(1)

warnings.filterwarnings("ignore", message=".*register_constant.*")

# AUTO must choose here as it does everywhere, whatever the tester has measured.
os.environ["TORCHAO_BLOCKWISE_TABLES"] = os.devnull


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device() -> str:
    """The device that tests run on: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fresh_dynamo():
    """torch.compile remembers nothing of other tests, and nothing stays for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def no_interpreter():
    """AUTO on a CPU takes the reference, not Triton's interpreter: the same bits, many times faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchao_blockwise.ops.backend.interpreting", lambda: False)
        yield
