"""Show installed versions, the backend of each operation and why others cannot run, and test all backends.

Each operation runs on small inputs with every backend that supports it, and is compared with the reference in eager
PyTorch. The first run on a GPU builds kernels, which takes a minute or two. On a CPU, TRITON_INTERPRET=1 also tests
the kernels in Triton's interpreter, which takes about a minute.

exit code: 0 healthy, 1 a problem or a wrong result, 2 invalid arguments
"""

from __future__ import annotations

import argparse

import torch

from torchao_blockwise.cli.inputs import UsageError, show
from torchao_blockwise.diagnostics.doctor import examine

HELP = "versions, backends of each operation, and a self-test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: the GPU, or the CPU if there is none")
    parser.add_argument("--no-run", action="store_true", help="list the backends without running kernels")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    examination = examine(_device(args.device), run=not args.no_run)
    show(examination, examination.to_dict() if args.json else None)
    return 0 if examination.is_healthy else 1


def _device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"PyTorch finds {torch.cuda.device_count()} GPUs, got --device {name}; use another one or cpu")
    return device
