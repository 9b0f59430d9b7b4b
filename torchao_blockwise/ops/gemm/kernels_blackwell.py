"""Swizzled block scales for PyTorch's NVFP4 GEMMs on Blackwell, and zeros for rows that they do not write, in Triton.

FP4 tensor cores read block scales in tiles of 128 rows × 4 scales:

    scale (row r, column c)  at byte  tile · 512 + (r % 32) · 16 + (r % 128 // 32) · 4 + c % 4

    rows    0 │  0 1 2 3          bytes    0 │ row 0 │ row 32 │ row 64 │ row 96      4 scales of each
            1 │  4 5 6 7                  16 │ row 1 │ row 33 │ row 65 │ row 97
           .. │                           .. │
          127 │                          496 │ row 31 │ row 63 │ row 95 │ row 127

Tiles are stored row by row. Each matrix, or group of tokens, has separate tiles, padded with zeros. The scale of a
square block is repeated for each row of the block.

Operands store the compact grid; each GEMM swizzles the scales that it reads, in one launch for each operand. For 16
elements, this moves 2 bytes, or 1 for square blocks. The GEMM itself reads 9, and quantization moved 41. If
quantization also wrote this layout, it would save the launch, but every operand would need a second grid.

Source: cuBLAS manual, "1D Block Scaling Factors Layout".
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.device.groups import load_ends, locate_tile_of_groups
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.launch import ceil_div, launch

_TILE_ROWS, _TILE_COLUMNS = 128, 4
# Adjacent tiles of a program, and its warps: it reads 64 bytes of a row, two sectors.
_TILES, _WARPS = 16, 4
_ROWS, _COLUMNS = tl.constexpr(_TILE_ROWS), tl.constexpr(_TILE_COLUMNS)
# Bytes of a tile, and the distance between the rows that share 16 of them.
_BYTES, _APART = tl.constexpr(_TILE_ROWS * _TILE_COLUMNS), tl.constexpr(32)
# Rows of a program that writes zeros, and the number of columns that it writes at a time.
_ZERO_ROWS, _ZERO_COLUMNS = 16, 512


@triton.jit(do_not_specialize=["M"])
def _swizzle_kernel(
    scale_ptr,  # [matrices, ⌈M/BLOCK_ROWS⌉, columns] e4m3 bytes
    out_ptr,  # tiles of _BYTES
    ends_ptr,  # int32 [groups], or None without groups; with groups, there is one matrix
    clamped_ptr,  # output: the clamped ends, or None
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
        # Scales of rows after the last group are left out.
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


def swizzled_scales(x: Operand) -> torch.Tensor:
    """The scales of `x` [.., M, K], swizzled: e4m3 [.., ⌈M/128⌉ · ⌈columns/4⌉ · 512], a row for each matrix."""
    *batch, M, _ = x.qdata.shape
    tiles = ceil_div(M, _TILE_ROWS) * ceil_div(x.scale.shape[-1], _TILE_COLUMNS)
    out = x.scale.new_empty((*batch, tiles * _BYTES.value))
    _launch(x, out, None, None)
    return out


def swizzled_scales_of_groups(x: Operand, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the swizzled scales of `x` [M, K], whose rows are in groups with separate tiles, and the clamped ends.

    Each program finds the group of its tiles, because only the device knows where they start.
    x: not empty. ends: int32 [E], cumulative. Scales of rows after the last group are left out.
    Returns e4m3 [padded_tokens(M, E, 128), ⌈columns/4⌉ · 4], of which only the order of bytes matters, with zeros after
    the last group; and int32 [E], max over i <= g of clamp(ends[i], 0, M).
    """
    M, columns = x.scale.shape
    rows = padded_tokens(M, ends.shape[0], _TILE_ROWS)
    out = x.scale.new_empty((rows, ceil_div(columns, _TILE_COLUMNS) * _TILE_COLUMNS))
    clamped = torch.empty_like(ends)
    _launch(x, out, ends, clamped)
    return out, clamped


def _launch(x: Operand, out: torch.Tensor, ends: torch.Tensor | None, clamped: torch.Tensor | None) -> None:
    if out.numel() == 0:
        return
    columns = x.scale.shape[-1]
    groups = 1 if ends is None else ends.shape[0]
    tiles_k = ceil_div(columns, _TILE_COLUMNS)
    tiles = out.numel() // (tiles_k * _BYTES.value)
    launch(
        _swizzle_kernel, tiles * ceil_div(tiles_k, _TILES),
        (x.scale.contiguous(), torch.uint8), (out, torch.uint8), ends, clamped, x.qdata.shape[-2], columns, groups,
        BLOCK_ROWS=x.format.block[0], TILES=_TILES, E_PAD=triton.next_power_of_2(groups), num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _zero_tail_kernel(
    out_ptr,  # [M, N]
    ends_ptr,  # [groups] int32, at most M
    M,
    N,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first, tail = tl.program_id(0) * ROWS, tl.load(ends_ptr + groups - 1)
    if first + ROWS <= tail:
        return
    rows = first + tl.arange(0, ROWS)
    mask = (rows >= tail) & (rows < M)
    row_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N
    zeros = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
    for column in range(0, N, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        tl.store(row_ptrs + columns[None, :], zeros, mask=mask[:, None] & (columns < N)[None, :])


def zero_tail_(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Set the rows of `out` [M, N] from the last end on to zero. ends: int32 [E], in [0, M].

    Only the device knows where they start. Programs of earlier rows return at once.
    """
    (M, N), groups = out.shape, ends.shape[0]
    launch(
        _zero_tail_kernel, ceil_div(M, _ZERO_ROWS), out, ends, M, N, groups,
        ROWS=_ZERO_ROWS, COLUMNS=_ZERO_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
