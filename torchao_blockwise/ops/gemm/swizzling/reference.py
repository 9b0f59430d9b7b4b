"""Swizzled scales in eager torch: a view of tiles, permuted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.gemm.swizzling.layout import ROWS_APART, TILE_COLUMNS, TILE_ROWS
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_rows


def swizzle(x: Operand) -> torch.Tensor:
    """Arguments and result as of `swizzled_scales`."""
    scale = x.scale.view(torch.uint8).repeat_interleave(x.format.block[0], dim=-2)
    return _permute(scale[..., : x.qdata.shape[-2], :]).flatten(-5).view(x.scale.dtype)


def swizzle_groups(x: Operand, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as of `swizzled_scales_of_groups`."""
    tokens = x.scale.shape[0]
    # The row behind the last one stands for none.
    with_none = F.pad(x.scale.view(torch.uint8), (0, 0, 0, 1))
    tiles = _permute(with_none[padded_rows(ends, tokens, TILE_ROWS)])
    return tiles.reshape(tiles.shape[0] * TILE_ROWS, -1).view(x.scale.dtype), clamped_ends(ends, tokens)


def _permute(scale: torch.Tensor) -> torch.Tensor:
    """Bytes [.., rows, columns] in tiles: [.., tile row, tile column, 32, 4, 4]."""
    rows, columns = scale.shape[-2:]
    padded = F.pad(scale, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = padded.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, TILE_ROWS // ROWS_APART, ROWS_APART))
    return tiles.movedim(-2, -4).transpose(-3, -2)
