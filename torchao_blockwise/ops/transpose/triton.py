"""Exact transposes of payload in Triton, a tile at a time through shared memory.

    bytes (e4m3)       tile [M, K] → tile [K, M]

    pairs of 4 bits    a byte of row 2i and the byte under it hold a 2×2 square of codes, and so do the two
    (e2m1)             bytes that they become:

                          row 2i      │ b a │       row 2j    │ c a │      (high nibble left, low nibble right;
                          row 2i + 1  │ d c │   →   row 2j+1  │ d b │       a, b are elements 2j, 2j+1 of row 2i)

                       Two tiles of bytes are read, even and odd rows, two are made from them, transposed and written.

Tiles are numbered along grid x alone, whose limit is 2^31. The scale grid is tiny: eager torch transposes it.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat

# (tile, warps) where rows start on 16 bytes, and where bytes are moved one by one and each has an address.
_ALIGNMENT = 16
_TILES = {True: (128, 16), False: (64, 8)}
# Of pairs, along both dims: 128 × 128 elements.
_PAIRS_TILE, _PAIRS_WARPS = 64, 4

_LOW = tl.constexpr(0x0F)
_HIGH = tl.constexpr(0xF0)


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
def _transpose_pairs_kernel(q_ptr, qt_ptr, M, K, packed_m, packed_k, TILE: tl.constexpr):
    """[B, M, ⌈K/2⌉] -> [B, K, ⌈M/2⌉] bytes of two 4-bit codes; a code beside the matrix is zero."""
    batch, pairs_m, pairs_k = _locate_tile(packed_m, packed_k, TILE)
    q_ptr += batch * M * packed_k
    even = _load_rows(q_ptr, 2 * pairs_m, pairs_k, M, packed_k)
    odd = _load_rows(q_ptr, 2 * pairs_m + 1, pairs_k, M, packed_k)
    low = (even & _LOW) | (odd << 4)
    high = (even >> 4) | (odd & _HIGH)
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
        B, packed_m = qdata.numel() // (M * packed_k), out.shape[-1]
        with torch.cuda.device_of(q):
            if fmt.element.per_byte == 1:
                tile, warps = _TILES[M % _ALIGNMENT == 0 and columns % _ALIGNMENT == 0]
                grid = (B * triton.cdiv(M, tile) * triton.cdiv(columns, tile),)
                _transpose_bytes_kernel[grid](q, qt, M, columns, TILE=tile, num_warps=warps)
            else:
                grid = (B * triton.cdiv(packed_m, _PAIRS_TILE) * triton.cdiv(packed_k, _PAIRS_TILE),)
                _transpose_pairs_kernel[grid](
                    q, qt, M, columns, packed_m, packed_k, TILE=_PAIRS_TILE, num_warps=_PAIRS_WARPS
                )
    return out, scale.mT.clone(memory_format=torch.contiguous_format)
