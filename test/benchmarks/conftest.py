"""Shared set-up of the benchmarks' tests: where scripts lie, threads, and runs that find no GPU, whatever there is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def one_thread():
    """At these sizes threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_gpu(monkeypatch):
    """Scripts, and the processes that they start, run on the CPU: what they are expected to say is known for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # PyTorch would remember what it counted while no GPU is to be seen.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
