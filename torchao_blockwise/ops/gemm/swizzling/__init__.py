"""Block scales in the order in which Blackwell's FP4 tensor cores read them: tiles of 128 rows × 4 scales.

    scale (row r, column c)  at byte  tile · 512 + (r % 32) · 16 + (r % 128 // 32) · 4 + c % 4

    rows    0 │  0 1 2 3          bytes    0 │ row 0 │ row 32 │ row 64 │ row 96      4 scales of each
            1 │  4 5 6 7                  16 │ row 1 │ row 33 │ row 65 │ row 97
           .. │                           .. │
          127 │                          496 │ row 31 │ row 63 │ row 95 │ row 127

Tiles lie row by row, those of a matrix, or of a group of tokens, for themselves; what no scale fills is zeros. A scale
of square blocks is repeated for each row of its block.

At rest an operand keeps its compact grid; a product lays out anew what it reads, one launch an operand. For 16 elements
that moves 2 bytes, or 1 for square blocks, beside 9 that the product reads and 41 that quantizing them moved. A
quantizer that wrote this order too would save that launch, and every operand would carry a second grid.

Source: cuBLAS manual, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from types import ModuleType

import torch

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.backend import why_no_triton
from torchao_blockwise.ops.gemm.swizzling import reference


def swizzled_scales(x: Operand) -> torch.Tensor:
    """The scales of `x` [.., M, K], swizzled: e4m3 [.., ⌈M/128⌉ · ⌈columns/4⌉ · 512], a row for each matrix."""
    return _implementation(x.scale.device).swizzle(x)


def swizzled_scales_of_groups(x: Operand, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of `x` [M, K], rows in groups, each group's in tiles of its own; and ends that lead out of no memory.

    x: not empty. ends: int32 [E], cumulative. Scales of rows of no group are left out.
    Returns e4m3 [padded_tokens(M, E, 128), ⌈columns/4⌉ · 4], of which only the order of bytes counts, zeros behind the
    last group; and int32 [E], max over i <= g of clamp(ends[i], 0, M).
    """
    return _implementation(x.scale.device).swizzle_groups(x, ends)


def _implementation(device: torch.device) -> ModuleType:
    if why_no_triton(device) is not None:
        return reference
    from torchao_blockwise.ops.gemm.swizzling import kernels_triton

    return kernels_triton
