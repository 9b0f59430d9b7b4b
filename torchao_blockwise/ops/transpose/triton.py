"""Exact transposes of payload in Triton, a tile at a time through shared memory.

    pairs              a pair of row 2i and the pair under it hold a 2×2 square of codes, and so do the two pairs that
                       they become:

                          row 2i      │ b a │       row 2j    │ c a │      (high half left, low half right;
                          row 2i + 1  │ d c │   →   row 2j+1  │ d b │       a, b are elements 2j, 2j+1 of row 2i)

                       Two tiles of pairs are read, even and odd rows, two are made from them, transposed and written.
                       A pair of 4-bit codes (e2m1) is a byte. A pair of bytes (e4m3) is a word of 16 bits, the least
                       that shared memory transposes by itself: half the instructions that bytes take.

    bytes (e4m3)       tile [M, K] → tile [K, M], where rows do not start on 16 bytes

Tiles are numbered along grid x alone, whose limit is 2^31. The scale grid is tiny: eager torch transposes it.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.launch import ceil_div, launch

_ALIGNMENT = 16
# Bits of a code -> (tile, warps), in pairs: 128 × 128 elements.
_PAIRS_TILES = {8: (64, 8), 4: (64, 4)}
# Bytes are moved one by one and each has an address.
_BYTES_TILE = (64, 8)


@triton.jit
def _locate_tile(rows, columns, TILE: tl.constexpr):
    """(matrix, row offsets, column offsets) of this program's square tile."""
    tiles_m, tiles_k = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    tile = tl.program_id(0)
    batch = (tile // tiles_k) // tiles_m
    offsets = tl.arange(0, TILE)
    return batch.to(tl.int64), (tile // tiles_k) % tiles_m * TILE + offsets, tile % tiles_k * TILE + offsets


@triton.jit
def _load_rows(ptr, offs_row, offs_column, rows, columns):
    """Rows of a contiguous [rows, columns], zero outside."""
    mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
    return tl.load(ptr + offs_row.to(tl.int64)[:, None] * columns + offs_column[None, :], mask=mask, other=0)


@triton.jit
def _store_rows(ptr, values, offs_row, offs_column, rows, columns):
    mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
    tl.store(ptr + offs_row.to(tl.int64)[:, None] * columns + offs_column[None, :], values, mask=mask)


@triton.jit
def _transpose_bytes_kernel(q_ptr, qt_ptr, M, K, TILE: tl.constexpr):
    """[B, M, K] -> [B, K, M] bytes."""
    batch, offs_m, offs_k = _locate_tile(M, K, TILE)
    tile = _load_rows(q_ptr + batch * M * K, offs_m, offs_k, M, K)
    _store_rows(qt_ptr + batch * M * K, tl.trans(tile), offs_k, offs_m, K, M)


@triton.jit
def _transpose_pairs_kernel(q_ptr, qt_ptr, M, K, packed_m, packed_k, BITS: tl.constexpr, TILE: tl.constexpr):
    """[B, M, ⌈K/2⌉] -> [B, K, ⌈M/2⌉] pairs of codes of BITS bits; a code beside the matrix is zero."""
    LOW: tl.constexpr = (1 << BITS) - 1
    if BITS == 8:
        # Rows start on 16 bytes. Triton by itself would know of multiples of 16 words, not of 8.
        packed_m, packed_k = packed_m // 8 * 8, packed_k // 8 * 8
    batch, pairs_m, pairs_k = _locate_tile(packed_m, packed_k, TILE)
    q_ptr += batch * M * packed_k
    even = _load_rows(q_ptr, 2 * pairs_m, pairs_k, M, packed_k)
    odd = _load_rows(q_ptr, 2 * pairs_m + 1, pairs_k, M, packed_k)
    low = (even & LOW) | (odd << BITS)
    high = (even >> BITS) | (odd & (LOW << BITS))
    qt_ptr += batch * K * packed_m
    _store_rows(qt_ptr, tl.trans(low), 2 * pairs_k, pairs_m, K, packed_m)
    _store_rows(qt_ptr, tl.trans(high), 2 * pairs_k + 1, pairs_m, K, packed_m)


def transpose(
    qdata: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata [.., M, packed(K)], scale [.., M blocks, K blocks] -> [.., K, packed(M)], [.., K blocks, M blocks]."""
    *leading, M, packed_k = qdata.shape
    out = qdata.new_empty((*leading, columns, fmt.element.packed(M)))
    if out.numel() > 0:
        q, qt = qdata.contiguous().view(torch.uint8), out.view(torch.uint8)
        B, bits = qdata.numel() // (M * packed_k), fmt.element.bits
        if bits == 8 and (M % _ALIGNMENT or columns % _ALIGNMENT or q.storage_offset() % 2):
            tile, warps = _BYTES_TILE
            tiles = B * ceil_div(M, tile) * ceil_div(columns, tile)
            launch(_transpose_bytes_kernel, tiles, q, qt, M, columns, TILE=tile, num_warps=warps)
        else:
            tile, warps = _PAIRS_TILES[bits]
            packed_m, packed_k = ceil_div(M, 2), ceil_div(columns, 2)
            tiles = B * ceil_div(packed_m, tile) * ceil_div(packed_k, tile)
            if bits == 8:
                q, qt = q.view(torch.uint16), qt.view(torch.uint16)
            options = {"BITS": bits, "TILE": tile, "num_warps": warps}
            launch(_transpose_pairs_kernel, tiles, q, qt, M, columns, packed_m, packed_k, **options)
    return out, scale.mT.clone(memory_format=torch.contiguous_format)
