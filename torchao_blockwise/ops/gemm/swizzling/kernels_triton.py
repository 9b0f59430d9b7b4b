"""Swizzled scales in Triton: a program re-lays some tiles that lie side by side.

           4 columns a tile                                      512 bytes a tile
         ┌────┬────┬─ ─                                       ┌───────────────────────┐
    128  │    │    │          ──read row by row, permuted──▶  ├───────────────────────┤
    rows └────┴────┴─ ─                                       └─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘

Rows in groups: the device alone knows where a group's tiles begin, so each program finds the group of its tiles.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.device.groups import load_ends, locate_tile_of_groups
from torchao_blockwise.ops.gemm.swizzling.layout import ROWS_APART, TILE_COLUMNS, TILE_ROWS
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.launch import ceil_div, launch

# Tiles of a program, and warps: 64 bytes of a row are read, two sectors.
_TILES, _WARPS = 16, 4
_ROWS, _COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS)
_BYTES, _APART = tl.constexpr(TILE_ROWS * TILE_COLUMNS), tl.constexpr(ROWS_APART)


@triton.jit(do_not_specialize=["M"])
def _swizzle_kernel(
    scale_ptr,  # [matrices, ⌈M/BLOCK_ROWS⌉, columns] e4m3 bytes
    out_ptr,  # tiles of _BYTES
    ends_ptr,  # None, or where rows lie in groups [groups] int32; one matrix then
    clamped_ptr,  # likewise, written
    M,
    columns,
    groups,
    BLOCK_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    E_PAD: tl.constexpr,
):
    tiles_k = tl.cdiv(columns, _COLUMNS)
    tile = tl.program_id(0) // tl.cdiv(tiles_k, TILES)
    offs_t = tl.program_id(0) % tl.cdiv(tiles_k, TILES) * TILES + tl.arange(0, TILES)
    if ends_ptr is None:
        tiles_m = tl.cdiv(M, _ROWS)
        scale_ptr += (tile // tiles_m).to(tl.int64) * tl.cdiv(M, BLOCK_ROWS) * columns
        first, end = tile % tiles_m * _ROWS, M
    else:
        group, first, end = locate_tile_of_groups(ends_ptr, tile, M, groups, _ROWS, E_PAD)
        # Rows of no group have no scales here.
        end = tl.where(group < groups, end, 0)
        if tl.program_id(0) == 0:
            index, ends, _ = load_ends(ends_ptr, M, groups, E_PAD)
            tl.store(clamped_ptr + index, ends, mask=index < groups)
    rows = first + tl.arange(0, _ROWS)
    offs_k = tl.program_id(0) % tl.cdiv(tiles_k, TILES) * (TILES * _COLUMNS) + tl.arange(0, TILES * _COLUMNS)
    mask = (rows < end)[:, None] & (offs_k < columns)[None, :]
    scales = tl.load(scale_ptr + (rows // BLOCK_ROWS).to(tl.int64)[:, None] * columns + offs_k, mask=mask, other=0)
    tiles = scales.reshape(_ROWS // _APART, _APART, TILES, _COLUMNS).permute(2, 1, 0, 3).reshape(TILES, _BYTES)
    offsets = (tile.to(tl.int64) * tiles_k + offs_t)[:, None] * _BYTES + tl.arange(0, _BYTES)[None, :]
    tl.store(out_ptr + offsets, tiles, mask=(offs_t < tiles_k)[:, None])


def swizzle(x: Operand) -> torch.Tensor:
    """Arguments and result as of `swizzled_scales`."""
    *batch, M, _ = x.qdata.shape
    tiles = ceil_div(M, TILE_ROWS) * ceil_div(x.scale.shape[-1], TILE_COLUMNS)
    out = x.scale.new_empty((*batch, tiles * _BYTES.value))
    _launch(x, out, None, None)
    return out


def swizzle_groups(x: Operand, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as of `swizzled_scales_of_groups`."""
    M, columns = x.scale.shape
    rows = padded_tokens(M, ends.shape[0], TILE_ROWS)
    out = x.scale.new_empty((rows, ceil_div(columns, TILE_COLUMNS) * TILE_COLUMNS))
    clamped = torch.empty_like(ends)
    _launch(x, out, ends, clamped)
    return out, clamped


def _launch(x: Operand, out: torch.Tensor, ends: torch.Tensor | None, clamped: torch.Tensor | None) -> None:
    if out.numel() == 0:
        return
    columns = x.scale.shape[-1]
    groups = 1 if ends is None else ends.shape[0]
    tiles_k = ceil_div(columns, TILE_COLUMNS)
    tiles = out.numel() // (tiles_k * _BYTES.value)
    launch(
        _swizzle_kernel, tiles * ceil_div(tiles_k, _TILES),
        (x.scale.contiguous(), torch.uint8), (out, torch.uint8), ends, clamped, x.qdata.shape[-2], columns, groups,
        BLOCK_ROWS=x.format.block[0], TILES=_TILES, E_PAD=triton.next_power_of_2(groups), num_warps=_WARPS,
    )  # fmt: skip
