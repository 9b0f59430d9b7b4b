"""Compare the values of the tensors of two checkpoints on disk, in FP8, NVFP4 or high precision.

If B is a JSON file {name: checksum}, the result of `checkpoint.checksums` for the tensors that A should have, bytes are
compared instead.

Scales of activations and of an engine's cache (input_scale, k_scale) may be missing in one of the checkpoints.

The last line is PASS, or FAIL with the number of differences.

exit code: 0 same names, shapes and values within the error of quantization, 1 a difference, 2 invalid arguments
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from torchao_blockwise.checkpoint import checksums
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.model_tensors import ENGINE_SCALES
from torchao_blockwise.checkpoint.stored_weights import StoredWeights
from torchao_blockwise.cli.inputs import UsageError
from torchao_blockwise.formats import NVFP4_16X16

HELP = "compare two checkpoints on disk"
_SHOWN = 10
# The largest relative error of rounding: e4m3 has three bits of mantissa, and 5 in e2m1 is rounded to 4 or 6.
_ROUNDING = {False: 2**-4, True: 1 / 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", type=Path)
    parser.add_argument("second", metavar="B", type=Path)
    parser.add_argument(
        "--error",
        type=float,
        help="largest relative error of a weight; default: that of one element, 0.0625 in FP8 and 0.2 in NVFP4",
    )


def run(args: argparse.Namespace) -> int:
    try:
        if args.second.is_file():
            problems = _by_checksums(Files(args.first), args.second)
        else:
            problems = _by_values(StoredWeights(args.first), StoredWeights(args.second), args.error)
    except (OSError, ValueError) as e:
        raise UsageError(str(e)) from None
    for problem in problems[:_SHOWN]:
        print(problem)
    if len(problems) > _SHOWN:
        print(f"and {len(problems) - _SHOWN} more")
    print(f"FAIL: {len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "PASS")
    return 1 if problems else 0


def _by_checksums(files: Files, written: Path) -> list[str]:
    """Return differences from the checksums in the file `written`, as sentences."""
    try:
        wanted = json.loads(written.read_text())
    except ValueError as error:
        raise ValueError(f"{written} is not JSON ({error}); write it again") from None
    if not isinstance(wanted, dict):
        raise ValueError(f"{written} must contain {{name: checksum}}, got a {type(wanted).__name__}; write it again")
    problems = _missing(files.path, wanted.keys() - files.tensors) + _missing(written, files.tensors.keys() - wanted)
    both = sorted(files.tensors.keys() & wanted)
    got = checksums((name, files.read(name)) for name in both)
    other = [name for name in both if got[name] != wanted[name]]
    print(f"{len(both) - len(other)} tensors are the same, {len(other)} have different bytes")
    return problems + [f"{name}: checksum {got[name]}, {written} has {wanted[name]}" for name in other]


def _by_values(first: StoredWeights, second: StoredWeights, allowed: float | None) -> list[str]:
    """Return differences of values, as sentences."""
    same, close, largest = 0, 0, 0.0
    problems = []
    for weights, others in ((first, second), (second, first)):
        names = {name for name in weights.names - others.names if not re.search(ENGINE_SCALES, name)}
        problems += _missing(others.files.path, names)
    for name in sorted(first.names & second.names):
        if (shape := first.shape(name)) != second.shape(name):
            problems.append(f"{name}: shape {list(shape)} and {list(second.shape(name))}")
            continue
        try:
            a, b = (weights.values(name, torch.float32).float() for weights in (first, second))
        except ValueError as reason:
            problems.append(str(reason))
            continue
        error = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())
        same, close, largest = same + (error == 0), close + (error != 0), max(largest, error)
        is_nvfp4 = NVFP4_16X16 in (first.format(name), second.format(name))
        if not error <= (_ROUNDING[is_nvfp4] if allowed is None else allowed):
            problems.append(f"{name}: relative error {error:.3g}")
    print(f"{same} tensors are the same, {close} have different values, relative error at most {largest:.3g}")
    return problems


def _missing(where: Path, names: set[str]) -> list[str]:
    return [f"{where} has no {name}" for name in sorted(names)]
