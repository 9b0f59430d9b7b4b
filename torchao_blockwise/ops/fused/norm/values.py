"""The inputs of a norm, as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """y = (x - mean) · rstd · weight + bias, in `dtype`; see `ops.normalize`.

    x: [M, K]. weight, bias: [K] or None. mean, rstd: f32 [M], as `ops.norm_statistics` gives them.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    dtype: torch.dtype
