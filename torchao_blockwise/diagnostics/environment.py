"""The environment: versions, device and driver, and known problems with them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

import torchao_blockwise
from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import torch_fsdp, triton_launcher
from torchao_blockwise.ops import backend

PROBLEM, NOTE = "problem", "note"


@dataclass(frozen=True)
class Finding:
    """A problem or note about the environment, with a remedy. kind: "problem", which must be solved, or "note"."""

    kind: str
    text: str


def facts(device: torch.device) -> dict[str, str]:
    """Return {package or device: version or description}; "-" if it is missing."""
    return {
        "torchao_blockwise": torchao_blockwise.__version__,
        "torch": torch.__version__,
        "torchao": installed("torchao") or "-",
        "triton": installed("triton") or "-",
        "CUDA of torch": torch.version.cuda or "-",
        "NVIDIA driver": driver_version() or "-",
        "Python": platform.python_version(),
        "device": described(device),
    }


def described(device: torch.device) -> str:
    """Return a description such as "NVIDIA H200, sm_90, 140 GiB, 1 of 8" or "cpu, 2 threads"."""
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    capability = "sm_{}{}".format(*backend.compute_capability(device))
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name}, {capability}, {memory}, 1 of {torch.cuda.device_count()}"


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


def findings(device: torch.device) -> list[Finding]:
    """Return findings about this environment, problems first."""
    of_versions = ((PROBLEM, _versions.why_too_old()), (NOTE, torch_fsdp.install()))
    found = [Finding(kind, reason) for kind, reason in of_versions if reason]
    return sorted([*found, *_of_triton(device), *_of_gpu(device)], key=lambda finding: finding.kind != PROBLEM)


def _of_triton(device: torch.device) -> Iterator[Finding]:
    is_gpu = device.type == "cuda"
    kind = PROBLEM if is_gpu else NOTE
    if not _compat.has_triton():
        yield Finding(kind, "triton is not installed: everything is computed by eager PyTorch (pip install triton)")
        return
    if backend.interpreting():
        yield Finding(
            kind,
            "TRITON_INTERPRET=1: kernels run in Triton's interpreter, thousands of times slower; unset it to train",
        )
    if is_gpu and not backend.interpreting() and (reason := triton_launcher.why_by_triton()):
        yield Finding(NOTE, f"kernels are launched by Triton's own launcher, which has more host overhead: {reason}")
    if is_gpu and not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        yield Finding(PROBLEM, "Triton needs a C compiler to build its launchers, and none was found; install gcc")


def _of_gpu(device: torch.device) -> Iterator[Finding]:
    if device.type != "cuda":
        if driver_version() and not torch.cuda.is_available():
            built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
            yield Finding(
                PROBLEM,
                f"an NVIDIA driver is installed, {driver_version()}, but PyTorch, which {built}, finds no GPU; install "
                "a PyTorch that fits the driver (pytorch.org/get-started), and check CUDA_VISIBLE_DEVICES",
            )
        return
    capability = backend.compute_capability(device)
    name = "sm_{}{}".format(*capability)
    if capability < (8, 0):
        yield Finding(PROBLEM, f"kernels need sm_80 or newer, got {name}: everything is computed by eager PyTorch")
    elif capability < (8, 9):
        yield Finding(
            NOTE, f"{name} has no FP8: GEMMs decode to f16, and eager PyTorch quantizes, which only saves memory"
        )
