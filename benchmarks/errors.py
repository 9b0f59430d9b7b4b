"""How far off a result is, computed on its device: on the host, GiBs of gradients take minutes."""

from __future__ import annotations

import math

import torch

# Elements that are held in fp64 at a time.
_PIECE = 2**26


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖, summed in fp64 on the tensors' device; 0 for equal zeros and empty tensors.

    actual, expected: of one shape, any strides and dtypes. NaN or Inf in either gives NaN or Inf.
    Raises ValueError where the shapes differ.
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
