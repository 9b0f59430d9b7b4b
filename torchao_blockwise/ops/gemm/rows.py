"""Rows as copies to shared memory want them: contiguous, and 16 bytes apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.ops.padding import ROW_BYTES


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [rows, columns], contiguous, with rows that fill whole 16 bytes: a copy with zeros behind, only if needed."""
    padding = -x.shape[1] * x.itemsize % ROW_BYTES // x.itemsize
    if padding:
        return F.pad(x.view(torch.uint8), (0, padding)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, padding))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ROW_BYTES else x
