"""Findings about an environment: each problem is reported, and nothing where all is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import torch_fsdp, triton_launcher, triton_tools
from torchao_blockwise.diagnostics import environment
from torchao_blockwise.diagnostics.environment import NOTE, PROBLEM, facts, findings
from torchao_blockwise.ops import backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = (9, 0)


@pytest.fixture
def patch(monkeypatch):
    """A machine in order: nothing to say of it."""
    for owner, name, value in (
        (_versions, "why_too_old", lambda: None),
        (_versions, "why_untested", lambda: None),
        (torch_fsdp, "why_unknown", lambda: None),
        (_compat, "has_triton", lambda: True),
        (_compat, "why_old_triton", lambda: None),
        (backend, "interpreting", lambda: False),
        (environment, "why_another_triton", lambda: None),
        (triton_launcher, "why_by_triton", lambda: None),
        (triton_tools, "why_no_cache", lambda: None),
        (triton_tools, "ptxas_version", lambda capability: "13.4"),
        (environment, "driver_version", lambda: None),
        (backend, "compute_capability", lambda device: HOPPER),
        (torch.version, "cuda", "13.0"),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setenv("CC", "gcc")
    return monkeypatch


# (what differs, the device, what it is there, a part of the sentence)
CASES = {
    "old torch": ((_versions, "why_too_old", lambda: "needs torch"), CPU, PROBLEM, "needs torch"),
    "newer torch": ((_versions, "why_untested", lambda: "newer"), GPU, NOTE, "newer"),
    "fsdp": ((torch_fsdp, "why_unknown", lambda: "FSDP2 of PyTorch"), CPU, NOTE, "FSDP2 of PyTorch"),
    "no triton": ((_compat, "has_triton", lambda: False), GPU, PROBLEM, "pip install triton"),
    "no triton on a cpu": ((_compat, "has_triton", lambda: False), CPU, NOTE, "pip install triton"),
    "old triton": ((_compat, "why_old_triton", lambda: "need Triton"), GPU, PROBLEM, "need Triton"),
    "interpreter": ((backend, "interpreting", lambda: True), GPU, PROBLEM, "unset it to train"),
    "interpreter on a cpu": ((backend, "interpreting", lambda: True), CPU, NOTE, "thousands of times slower"),
    "another triton": ((environment, "why_another_triton", lambda: "built with"), GPU, NOTE, "built with"),
    "launcher": ((triton_launcher, "why_by_triton", lambda: "Triton 3.99"), GPU, NOTE, "host overhead: Triton 3.99"),
    "cache": ((triton_tools, "why_no_cache", lambda: "TRITON_CACHE_DIR"), GPU, NOTE, "TRITON_CACHE_DIR"),
    "driver without gpu": ((environment, "driver_version", lambda: "580.1"), CPU, PROBLEM, "580.1, but PyTorch, which"),
    "turing": ((backend, "compute_capability", lambda device: (7, 5)), GPU, PROBLEM, "sm_80 or newer, got sm_75"),
    "ampere": ((backend, "compute_capability", lambda device: (8, 0)), GPU, NOTE, "sm_80 has no FP8"),
}


@pytest.mark.parametrize(("change", "device", "kind", "text"), CASES.values(), ids=CASES)
def test_what_is_wrong_is_said(patch, change, device, kind, text):
    if text.startswith("580"):
        patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(*change)
    (found,) = findings(device)
    assert found.kind == kind and text in found.text


def test_a_missing_compiler_is_a_problem_on_a_gpu_and_else_all_is_in_order(patch):
    assert findings(CPU) == findings(GPU) == []
    patch.delenv("CC")
    patch.setenv("PATH", "")
    (found,) = findings(GPU)
    assert found.kind == PROBLEM and "install gcc" in found.text and findings(CPU) == []


def test_problems_come_first(patch):
    patch.setattr(_versions, "why_untested", lambda: "newer")
    patch.setattr(_compat, "has_triton", lambda: False)
    assert [found.kind for found in findings(GPU)] == [PROBLEM, NOTE]


@pytest.mark.parametrize(
    ("required", "said"),
    (
        (["numpy", 'triton==3.6.0; platform_system == "Linux"'], "needs Triton 3.6.0, got 3.7.1"),
        (["triton~=3.9.0"], "needs Triton 3.9.0, got 3.7.1: torch.compile may fail (pip install triton==3.9.0)"),
        (["triton==3.7.1"], None),
        (["triton~=3.7.0"], None),
        (["pytorch-triton-rocm==3.0"], None),
        (None, None),
    ),
    ids=str,
)
def test_a_triton_that_is_not_pytorchs(monkeypatch, required, said):
    monkeypatch.setattr(environment.metadata, "requires", lambda package: required)
    monkeypatch.setattr(environment, "installed", lambda package: "3.7.1")
    found = environment.why_another_triton()
    assert found is None if said is None else said in found


@pytest.mark.parametrize("capability", ((8, 0), (9, 0), (10, 0)), ids=str)
def test_the_assembler_is_the_one_that_builds_for_the_gpu(monkeypatch, capability):
    """Which of Triton's two that is depends on the GPU and on Triton."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr(backend, "compute_capability", lambda device: capability)
    built_by = compiler.get_ptxas(10 * capability[0] + capability[1]).version
    assert environment._ptxas_version(GPU) == str(built_by)
    assert environment._ptxas_version(CPU) == str(compiler.get_ptxas(90).version)


def test_facts_of_this_machine(device):
    found = facts(torch.device(device))
    assert found["torch"] == torch.__version__ and found["Python"].startswith("3.") and found["device"].count(",") >= 1


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "a" / "b"))
    assert triton_tools.why_no_cache() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    assert "set TRITON_CACHE_DIR" in triton_tools.why_no_cache()


def test_the_tested_versions_are_those_of_the_constraints():
    text = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", text, flags=re.MULTILINE))
    assert {name: ".".join(map(str, tested)) for name, tested in _versions._TESTED.items()}.items() <= pinned.items()


VERSIONS = {"2.13.1": False, "2.14.0+cu130": True, "3.0": True, "main": False}


@pytest.mark.parametrize(("version", "is_newer"), VERSIONS.items(), ids=VERSIONS)
def test_newer_versions_are_told(version, is_newer, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    said = _versions.why_untested() or ""
    assert (f"torch {version} (tested up to 2.13)" in said) is is_newer
