"""Compare two checkpoints on disk, in FP8, NVFP4 or plain, by what their tensors stand for.

exit code: 0 the same names, shapes and values within the quantization's error, 1 not, 2 wrong arguments
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchao_blockwise.checkpoint import stored
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.cli.terminal import UsageError

HELP = "compare two checkpoints on disk"
_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", type=Path)
    parser.add_argument("second", metavar="B", type=Path)
    parser.add_argument(
        "--error",
        type=float,
        help="of a weight, relative, that is let pass; default: 0.0625 in FP8, 0.2 in NVFP4, as its element rounds",
    )


def run(args: argparse.Namespace) -> int:
    try:
        first, second = Files(args.first), Files(args.second)
    except (OSError, ValueError) as e:
        raise UsageError(str(e)) from None
    problems, same, close, largest = [], 0, 0, 0.0
    of_both = [stored.weights_in(files) for files in (first, second)]
    for folder, names in ((args.second, of_both[0] - of_both[1]), (args.first, of_both[1] - of_both[0])):
        problems += [f"{folder} has no {name}" for name in sorted(names)]
    for name in sorted(of_both[0] & of_both[1]):
        shapes = [stored.shape(files, name) for files in (first, second)]
        if shapes[0] != shapes[1]:
            problems.append(f"{name}: shape {shapes[0]} and {shapes[1]}")
            continue
        error = _error(first, second, name)
        allowed = max(stored.rounding(files, name) for files in (first, second)) if args.error is None else args.error
        same, close, largest = same + (error == 0), close + (error != 0), max(largest, error)
        if not error <= allowed:
            problems.append(f"{name}: relative error {error:.3g}")
    print(f"{same} tensors the same, {close} with other values, relative error at most {largest:.3g}")
    for problem in problems[:_SHOWN]:
        print(problem)
    if len(problems) > _SHOWN:
        print(f"and {len(problems) - _SHOWN} more")
    return 1 if problems else 0


def _error(first: Files, second: Files, name: str) -> float:
    a, b = (_values(files, name) for files in (first, second))
    if torch.equal(a, b):
        return 0.0
    return float((a - b).norm() / b.norm())


def _values(files: Files, name: str) -> torch.Tensor:
    held = stored.quantized(files, name, torch.float32)
    return files.read(name).float() if held is None else held.dequantize()
