"""Findings about an environment: each problem is reported, and nothing where all is right."""

import pytest
import torch

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import torch_fsdp, triton_launcher
from torchao_blockwise.diagnostics import environment
from torchao_blockwise.diagnostics.environment import NOTE, PROBLEM, facts, findings
from torchao_blockwise.ops import backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def patch(monkeypatch):
    """A machine without findings."""
    for owner, name, value in (
        (_versions, "why_too_old", None),
        (torch_fsdp, "install", None),
        (_compat, "has_triton", True),
        (backend, "interpreting", False),
        (triton_launcher, "why_by_triton", None),
        (environment, "driver_version", None),
    ):
        monkeypatch.setattr(owner, name, lambda value=value: value)
    monkeypatch.setattr(backend, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CC", "gcc")
    return monkeypatch


# (what differs, the device, the kind of finding, a part of its sentence)
CASES = {
    "old torch": ((_versions, "why_too_old", lambda: "needs torch"), CPU, PROBLEM, "needs torch"),
    "fsdp": ((torch_fsdp, "install", lambda: "FSDP2 of PyTorch"), CPU, NOTE, "FSDP2 of PyTorch"),
    "no triton": ((_compat, "has_triton", lambda: False), GPU, PROBLEM, "pip install triton"),
    "no triton on a cpu": ((_compat, "has_triton", lambda: False), CPU, NOTE, "pip install triton"),
    "interpreter": ((backend, "interpreting", lambda: True), GPU, PROBLEM, "unset it to train"),
    "interpreter on a cpu": ((backend, "interpreting", lambda: True), CPU, NOTE, "thousands of times slower"),
    "launcher": ((triton_launcher, "why_by_triton", lambda: "Triton 3.99"), GPU, NOTE, "host overhead: Triton 3.99"),
    "driver without gpu": ((environment, "driver_version", lambda: "580.1"), CPU, PROBLEM, "580.1, but PyTorch, which"),
    "turing": ((backend, "compute_capability", lambda device: (7, 5)), GPU, PROBLEM, "sm_80 or newer, got sm_75"),
    "ampere": ((backend, "compute_capability", lambda device: (8, 0)), GPU, NOTE, "sm_80 has no FP8"),
}


@pytest.mark.parametrize(("change", "device", "kind", "text"), CASES.values(), ids=CASES)
def test_each_problem_is_reported(patch, change, device, kind, text):
    if text.startswith("580"):
        patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(*change)
    (found,) = findings(device)
    assert found.kind == kind and text in found.text


def test_a_missing_compiler_is_a_problem_on_a_gpu_and_problems_come_first(patch):
    assert findings(CPU) == findings(GPU) == []
    patch.delenv("CC")
    patch.setenv("PATH", "")
    patch.setattr(torch_fsdp, "install", lambda: "unknown")
    first, second = findings(GPU)
    assert first.kind == PROBLEM and "install gcc" in first.text and [second] == findings(CPU)


def test_facts_of_this_machine(device):
    found = facts(torch.device(device))
    assert found["torch"] == torch.__version__ and found["Python"].startswith("3.") and found["device"].count(",") >= 1
