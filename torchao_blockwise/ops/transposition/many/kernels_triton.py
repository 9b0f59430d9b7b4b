"""Exact transposes of many payloads and scale grids in Triton, a launch each; see `device/tables.py` for how.

The tiles are those of a single transpose: elements as they are, or bytes of two 4-bit codes, two rows at a time.
Payloads whose addresses and sizes allow it move 16 bytes at a time; they take a launch of their own.
"""

import math

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.device.tables import ALIGNMENT, find_row, grouped, load_pointer, load_size, make_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.transposition.kernels_triton import _entries, _exchange

# (tile, warps) of elements: where rows start on 16 bytes, where they do not, and of scales, of which there are few.
_TILES = {True: (128, 16), False: (64, 8)}
_SCALES_TILE = (32, 8)
# Of pairs, along both dims.
_PAIRS_TILES = {True: (64, 4), False: (64, 8)}

_FIELDS = tl.constexpr(7)


@triton.jit
def _load_row(table_ptr, count, DTYPE: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """(source, target, rows and columns of its matrix, rows and columns that are tiled, row and column offsets).

    Pointers are the matrix' own; sizes that are tiled are multiples of ALIGN.
    """
    row_ptr, _, tile = find_row(table_ptr, count, _FIELDS)
    source_ptr = load_pointer(row_ptr + 1, DTYPE, ALIGN > 1)
    target_ptr = load_pointer(row_ptr + 2, DTYPE, ALIGN > 1)
    M, K = tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    tiled_m, tiled_k = load_size(row_ptr + 5, ALIGN), load_size(row_ptr + 6, ALIGN)
    tiles_m, tiles_k = tl.cdiv(tiled_m, TILE), tl.cdiv(tiled_k, TILE)
    matrix = ((tile // tiles_k) // tiles_m).to(tl.int64)
    offs_m = (tile // tiles_k) % tiles_m * TILE + tl.arange(0, TILE)
    offs_k = tile % tiles_k * TILE + tl.arange(0, TILE)
    return source_ptr + matrix * M * tiled_k, target_ptr + matrix * K * tiled_m, M, K, tiled_m, tiled_k, offs_m, offs_k


@triton.jit(do_not_specialize=["count"])
def _transpose_elements_kernel(table_ptr, count, DTYPE: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """[B, M, K] -> [B, K, M] elements."""
    source_ptr, target_ptr, _, _, M, K, offs_m, offs_k = _load_row(table_ptr, count, DTYPE, ALIGN, TILE)
    source, inside = _entries(source_ptr, offs_m, offs_k, M, K)
    elements = tl.load(source, mask=inside, other=0)
    target, inside = _entries(target_ptr, offs_k, offs_m, K, M)
    tl.store(target, tl.trans(elements), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _transpose_pairs_kernel(table_ptr, count, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """[B, M, ⌈K/2⌉] -> [B, K, ⌈M/2⌉] bytes of two 4-bit codes; a code beside the matrix is zero."""
    source_ptr, target_ptr, M, K, packed_m, packed_k, pairs_m, pairs_k = _load_row(
        table_ptr, count, tl.uint8, ALIGN, TILE
    )
    source, inside = _entries(source_ptr, pairs_m, pairs_k, packed_m, packed_k, 2)
    even = tl.load(source, mask=inside, other=0)
    odd = tl.load(source + packed_k, mask=inside & (pairs_m < M // 2)[:, None], other=0)
    even, odd = _exchange(even, odd, 0x0F, 4)
    target, inside = _entries(target_ptr, pairs_k, pairs_m, packed_k, packed_m, 2)
    tl.store(target, tl.trans(even), mask=inside)
    tl.store(target + packed_m, tl.trans(odd), mask=inside & (pairs_k < K // 2)[:, None])


def transpose_many(qdata, scales, columns, fmt: BlockFormat) -> list[torch.Tensor]:
    """Payloads [.., K, packed(M)], then scale grids [.., K blocks, M blocks]; see `ops.transpose_many`."""
    packed = fmt.element.packed
    sources = [q.contiguous() for q in qdata]
    targets = [q.new_empty((*q.shape[:-2], width, packed(q.shape[-2]))) for q, width in zip(sources, columns)]
    # (M, K, and how many of their entries are tiled) of each payload.
    sizes = [(q.shape[-2], width, packed(q.shape[-2]), packed(width)) for q, width in zip(sources, columns)]

    def aligned(i: int) -> bool:
        addresses = (sources[i].data_ptr(), targets[i].data_ptr())
        return all(x % ALIGNMENT == 0 for x in (*sizes[i], *addresses))

    for flag, group in grouped(range(len(sources)), aligned):
        align = ALIGNMENT if flag else 1
        if fmt.element.per_byte == 1:
            kernel, (tile, warps), options = _transpose_elements_kernel, _TILES[flag], {"DTYPE": tl.uint8}
        else:
            kernel, (tile, warps), options = _transpose_pairs_kernel, _PAIRS_TILES[flag], {}
        _launch(kernel, sources, targets, sizes, group, tile, warps, ALIGN=align, **options)

    grids = [s.contiguous() for s in scales]
    transposed = [s.new_empty(s.mT.shape) for s in grids]
    tile, warps = _SCALES_TILE
    dtype = {1: tl.uint8, 4: tl.int32}[fmt.scale_dtype.itemsize]
    sizes = [(*s.shape[-2:], *s.shape[-2:]) for s in grids]
    everything = range(len(grids))
    _launch(_transpose_elements_kernel, grids, transposed, sizes, everything, tile, warps, DTYPE=dtype, ALIGN=1)
    return targets + transposed


def _launch(kernel, sources, targets, sizes, group, tile: int, warps: int, **options) -> None:
    rows = (
        (
            math.prod(sources[i].shape[:-2]) * ceil_div(sizes[i][2], tile) * ceil_div(sizes[i][3], tile),
            sources[i].data_ptr(),
            targets[i].data_ptr(),
            *sizes[i],
        )
        for i in group
    )
    table = make_table(rows, sources[0].device)
    if table is not None:
        launch(kernel, table.programs, table.tensor, table.rows, TILE=tile, num_warps=warps, **options)
