"""How far off a result is, and why something has no figure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Elements that are held in fp64 at a time.
_PIECE = 2**26


class Unavailable(Exception):
    """Why a peer cannot do this here."""


class Wrong(Exception):
    """How a result differs from the expected one."""


def reason(error: Exception) -> str:
    """One line that says what went wrong."""
    lines = str(error).strip().splitlines()
    if isinstance(error, Unavailable):
        return lines[0]
    if isinstance(error, Wrong):
        return f"WRONG, {lines[0]}"
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def check(error: float, budget: float) -> float:
    """`error`, which may be `budget` at most; raises Wrong where it is more, or NaN."""
    if not error <= budget:
        raise Wrong(f"relative error {error:.2g} above {budget:.2g}")
    return error


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖, summed in fp64 on the tensors' device; 0 for equal zeros and empty tensors.

    NaN or Inf in either gives NaN or Inf. Raises ValueError where the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"relative_error: shapes differ, got {list(actual.shape)} and {list(expected.shape)}")
    error = norm = torch.zeros((), dtype=torch.float64, device=expected.device)
    for a, b in zip(actual.reshape(-1).split(_PIECE), expected.reshape(-1).split(_PIECE)):
        b = b.double()
        error = error + (a.double() - b).square().sum()
        norm = norm + b.square().sum()
    error, norm = math.sqrt(error.item()), math.sqrt(norm.item())
    return error / norm if norm else error


def check_bits(got, expected) -> None:
    """Raises Wrong where tensors in nested tuples are not bitwise identical to those expected."""
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        # A scalar has no bytes to look at.
        bits = [x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(*bits):
            raise Wrong("bits differ from the reference's; not timed")


def tensors(x) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors(item)
