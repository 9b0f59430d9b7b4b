"""Where a number comes from: device, versions and commit; and how results are written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from torchao_blockwise.diagnostics.environment import installed

# For NCCL and symmetric memory: NVLink multicast is off on shared hosts, whose other GPUs it can put out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def environment(device: torch.device) -> dict:
    """Device, versions and commit, so that a number can be traced to what made it."""
    return {
        "device": device_name(device),
        "power limit W": _power_limit(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("torchao", "triton", "torchao_blockwise", "sgl-deep-gemm")},
        "commit": _git_commit(),
        "command": " ".join(sys.argv[1:]),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def slug(device: torch.device) -> str:
    """The device in a file name: `cpu`, `nvidia_h200`."""
    name = "cpu" if device.type == "cpu" else device_name(device)
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def write_text(path: Path, text: str) -> None:
    """Write `path` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: dict) -> None:
    """`content` as strict JSON: NaN and Inf are errors."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _power_limit(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=enforced.power.limit", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _git_commit() -> str | None:
    """BENCHMARK_COMMIT; without it the checkout's commit, `-dirty` with uncommitted changes; None without git."""
    if "BENCHMARK_COMMIT" in os.environ:
        return os.environ["BENCHMARK_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
