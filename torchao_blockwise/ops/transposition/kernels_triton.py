"""Exact transposes of payload and scale grid in Triton, a tile at a time through shared memory, in one launch.

    quads (e4m3)   a word of row 4i and the words of the three rows under it hold a 4×4 square of bytes, and so do the
                   four words that they become:

                          row 4i      │ d c b a │       row 4j      │ m i e a │
                          row 4i + 1  │ h g f e │   →   row 4j + 1  │ n j f b │      (low byte right; d c b a are
                          row 4i + 2  │ l k j i │       row 4j + 2  │ o k g c │      elements 4j+3 .. 4j of row 4i)
                          row 4i + 3  │ p o n m │       row 4j + 3  │ p l h d │

                   A program reads four tiles of words, each of every fourth row, computes four tiles from them in
                   registers, and writes their transposes. Transposing words through shared memory takes a quarter of
                   the instructions of transposing bytes.

    pairs (e2m1)   the same with bytes of two codes, which hold a 2×2 square

If e4m3 rows do not start at multiples of 16 bytes, PyTorch copies the transposes. Tiles are numbered along grid x only,
whose limit is 2^31. A program also transposes the scales of its tile.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.device.tiles import locate_tile
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.padding import ROW_BYTES

# At least this number of elements -> (tile rows, tile columns, warps). Large tiles read and write longer runs of a row,
# but small matrices would have too few of them for the GPU.
_QUADS_TILES = {0: (256, 128, 4), 64 << 20: (256, 256, 8)}
_PAIRS_TILE = (128, 128, 4)


@triton.jit
def _entries(ptr, offs_row, offs_column, rows, columns, STEP: tl.constexpr = 1):
    """(addresses, mask) of elements of every STEP-th row of a contiguous matrix; `rows` is the number of these rows."""
    offsets = offs_row.to(tl.int64)[:, None] * (STEP * columns) + offs_column[None, :]
    return ptr + offsets, (offs_row < rows)[:, None] & (offs_column < columns)[None, :]


@triton.jit
def _exchange(x, y, LOW: tl.constexpr, BITS: tl.constexpr):
    """Exchange the high codes of `x` with the low codes of `y`. LOW: the bits of the low codes of a word."""
    return (x & LOW) | ((y & LOW) << BITS), ((x >> BITS) & LOW) | (y & (LOW << BITS))


@triton.jit
def _move_scales(
    s_ptr, st_ptr, batch, tile_m, tile_k, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr
):
    """[B, M blocks, K blocks] -> [B, K blocks, M blocks] for the blocks of a tile; tiles of one block all write it."""
    blocks_m, blocks_k = tl.cdiv(M, BLOCK), tl.cdiv(K, BLOCK)
    offs_m = tile_m * TILE_M // BLOCK + tl.arange(0, max(1, TILE_M // BLOCK))
    offs_k = tile_k * TILE_K // BLOCK + tl.arange(0, max(1, TILE_K // BLOCK))
    source, inside = _entries(s_ptr + batch * blocks_m * blocks_k, offs_m, offs_k, blocks_m, blocks_k)
    scales = tl.load(source, mask=inside, other=0)
    target, inside = _entries(st_ptr + batch * blocks_m * blocks_k, offs_k, offs_m, blocks_k, blocks_m)
    tl.store(target, tl.trans(scales), mask=inside)


@triton.jit
def _transpose_quads_kernel(
    q_ptr, qt_ptr, s_ptr, st_ptr, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr
):
    """[B, M, K/4] -> [B, K, M/4] words of four bytes."""
    batch, tile_m, tile_k, _, _ = locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, True)
    # Rows start at multiples of 16 bytes, but Triton cannot derive this from K // 4.
    words_m, words_k = M // 16 * 4, K // 16 * 4
    offs_m = tile_m * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    offs_k = tile_k * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
    source, inside = _entries(q_ptr + batch * M * words_k, offs_m, offs_k, words_m, words_k, 4)
    a = tl.load(source, mask=inside, other=0)
    b = tl.load(source + words_k, mask=inside, other=0)
    c = tl.load(source + 2 * words_k, mask=inside, other=0)
    d = tl.load(source + 3 * words_k, mask=inside, other=0)
    _move_scales(s_ptr, st_ptr, batch, tile_m, tile_k, M, K, TILE_M, TILE_K, BLOCK)
    # Single bytes between rows 0 and 1 and rows 2 and 3, then halves of words between rows two apart.
    a, b = _exchange(a, b, 0x00FF00FF, 8)
    c, d = _exchange(c, d, 0x00FF00FF, 8)
    a, c = _exchange(a, c, 0x0000FFFF, 16)
    b, d = _exchange(b, d, 0x0000FFFF, 16)
    target, inside = _entries(qt_ptr + batch * K * words_m, offs_k, offs_m, words_k, words_m, 4)
    tl.store(target, tl.trans(a), mask=inside)
    tl.store(target + words_m, tl.trans(b), mask=inside)
    tl.store(target + 2 * words_m, tl.trans(c), mask=inside)
    tl.store(target + 3 * words_m, tl.trans(d), mask=inside)


@triton.jit
def _transpose_pairs_kernel(
    q_ptr, qt_ptr, s_ptr, st_ptr, M, K, packed_m, packed_k,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[B, M, ⌈K/2⌉] -> [B, K, ⌈M/2⌉] bytes of two 4-bit codes; codes outside the matrix are zero."""
    batch, tile_m, tile_k, _, _ = locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, True)
    offs_m = tile_m * (TILE_M // 2) + tl.arange(0, TILE_M // 2)
    offs_k = tile_k * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
    source, inside = _entries(q_ptr + batch * M * packed_k, offs_m, offs_k, packed_m, packed_k, 2)
    even = tl.load(source, mask=inside, other=0)
    odd = tl.load(source + packed_k, mask=inside & (offs_m < M // 2)[:, None], other=0)
    _move_scales(s_ptr, st_ptr, batch, tile_m, tile_k, M, K, TILE_M, TILE_K, BLOCK)
    even, odd = _exchange(even, odd, 0x0F, 4)
    target, inside = _entries(qt_ptr + batch * K * packed_m, offs_k, offs_m, packed_k, packed_m, 2)
    tl.store(target, tl.trans(even), mask=inside)
    tl.store(target + packed_m, tl.trans(odd), mask=inside & (offs_k < K // 2)[:, None])


def transpose(x: Operand, columns: int) -> Operand:
    """qdata [.., M, packed(K)], scale [.., M blocks, K blocks] -> [.., K, packed(M)], [.., K blocks, M blocks]."""
    q, s, fmt = x.qdata.contiguous(), x.scale.contiguous(), x.format
    *leading, M, packed_k = q.shape
    if fmt.element.bits == 8 and (M | columns | q.data_ptr() | q.storage_offset()) % ROW_BYTES:
        out, scale_out = (t.mT.clone(memory_format=torch.contiguous_format) for t in (q, s))
        return x._replace(qdata=out, scale=scale_out)
    out, scale_out = q.new_empty((*leading, columns, fmt.element.packed(M))), s.new_empty(s.mT.shape)
    if out.numel() > 0:
        sizes: tuple[int, ...] = (M, columns)
        if fmt.element.bits == 4:
            kernel, entries, (tile_m, tile_k, warps) = _transpose_pairs_kernel, torch.uint8, _PAIRS_TILE
            sizes += (out.shape[-1], packed_k)
        else:
            kernel, entries = _transpose_quads_kernel, torch.uint32
            tile_m, tile_k, warps = _QUADS_TILES[max(least for least in _QUADS_TILES if least <= out.numel())]
        matrices = q.numel() // (M * packed_k)
        tiles = matrices * ceil_div(M, tile_m) * ceil_div(columns, tile_k)
        bits = {1: torch.uint8, 4: torch.int32}[s.itemsize]
        tensors = (q, entries), (out, entries), (s, bits), (scale_out, bits)
        options = {"TILE_M": tile_m, "TILE_K": tile_k, "BLOCK": fmt.block[0], "num_warps": warps}
        launch(kernel, tiles, *tensors, *sizes, **options)
    return x._replace(qdata=out, scale=scale_out)
