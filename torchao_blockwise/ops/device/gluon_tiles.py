"""Tiles of Gluon kernels that quantize to FP8: in shared memory, read in a separate layout for each copy.

    tile [128, COLUMNS], as words of two neighbors of a row
      ├─ by rows      a thread has 16 neighbors of a row
      │               max along the row  → scale, q  [M, K], 16 bytes a store
      └─ by columns   a thread has 16 rows of a word, so of two columns
                      max along the rows → scale, qᵀ [K, M], 16 bytes a store; in square blocks max of the tile

Columnwise copies are read transposed, so values are never transposed in registers, and only one set of values is live
at a time. Two elements of 16 bits share a word, and are loaded and compared together (`max.u16x2`, from sm_90 on). The
words of a row are swizzled, differently every 16 rows, so that reading by columns has no bank conflicts; reading by
rows has conflicts of two.

Tiles are numbered along grid x only. Kernels read and write 16 bytes at a time (see `why_no_tiles`); zeros pad the
tokens of the columnwise copy (ops/padding.py). With groups of tokens, a tile is a block of their table
(device/groups.py): it begins at any row, and is stored columnwise at a multiple of 128.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.formats import CastOptions, Copies, Groups
from torchao_blockwise.ops.device.elements import DTYPES, encode_e4m3
from torchao_blockwise.ops.device.scales import fp8_scales
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import as_asked, new_copies, pointers

# Its name moved in Triton 3.7.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_RUN = 16  # elements of a store of payload
_THREADS = 32  # of a warp
_MAGNITUDES = gl.constexpr(0x7FFF7FFF)
_HIGH = gl.constexpr(-(1 << 16))


@gluon.constexpr_function
def copy_layout(words, warps):
    """The layout of words in copies to shared memory: 16 bytes a thread, along rows of `words` words."""
    return gl.BlockedLayout([1, 4], [_THREADS * 4 // words, words // 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def _row_layout(warps):
    """Words by rows: each thread has a run of a row, with 8 threads in a row."""
    return gl.BlockedLayout([1, _RUN // 2], [_THREADS // 8, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _column_layout(warps):
    """Words by columns: each thread has a run of rows, with 8 threads in a column of 128 rows."""
    return gl.BlockedLayout([_RUN, 1], [8, _THREADS // 8], [1, warps], [0, 1])


@gluon.constexpr_function
def _vector_layout(warps):
    """One value in each thread: computed once for each block, and not in each thread that has a part of it."""
    return gl.BlockedLayout([1], [_THREADS], [warps], [0])


@gluon.constexpr_function
def _tile_layout():
    """16 bytes stay together; every 16 rows, where the next thread of a column starts, banks change."""
    return gl.SwizzledSharedLayout(4, 16, 8, [1, 0])


@gluon.jit
def new_tile(B: gl.constexpr):
    """Shared memory of a tile, as words."""
    LAYOUT: gl.constexpr = _tile_layout()
    return gl.allocate_shared_memory(gl.int32, [B.block, B.tile_columns // 2], LAYOUT)


@gluon.jit
def _larger_halves(a, b):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def halves(words, DTYPE: gl.constexpr):
    """fp32 of the low and of the high half of each word: elements 2i and 2i + 1."""
    if DTYPE.is_bf16():
        # The upper half of an fp32: one instruction an element, where a conversion of 16 bits takes two.
        return (words << 16).to(gl.float32, bitcast=True), (words & _HIGH).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
        return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def joined(low, high, DTYPE: gl.constexpr):
    """Words of fp32 elements 2i and 2i + 1, rounded to nearest even."""
    NAME: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + NAME + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest_halves(words, axis: gl.constexpr, DTYPE: gl.constexpr):
    """Bits of max |x| along `axis` in fp32, of low and high halves. As integers, NaN is the largest."""
    low, high = halves(gl.reduce(words & _MAGNITUDES, axis, _larger_halves), DTYPE)
    return low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True)


@gluon.jit
def _store(ptr, values, row, column, rows, columns):
    """Store `values` at (row, column) of a contiguous [rows, columns]; row: [R, 1], column: [1, C]."""
    mask = (row < rows) & (column < columns)
    gl.store(ptr + row.to(gl.int64) * columns + column, values, mask=mask)


@gluon.jit
def _store_rowwise(
    tile,  # of one block's columns
    q_ptr,  # [M, K] e4m3 bytes
    s_ptr,  # [K/BLOCK, M] f32
    tile_k,
    first,  # the tile's first row
    end,  # and its last, and one
    M,
    K,
    B: gl.constexpr,
):
    """Quantize the rows of a tile as `ops.quantize` does and store them."""
    BLOCK: gl.constexpr = B.block
    ROW: gl.constexpr = _row_layout(B.warps)
    VECTOR: gl.constexpr = _vector_layout(B.warps)
    words = tile.load(ROW)
    low_amax, high_amax = _largest_halves(words, 1, B.dtype)
    amax = gl.convert_layout(gl.maximum(low_amax, high_amax), VECTOR)
    encode, scale = fp8_scales(amax, B.element_max, B.min_amax, B.power_of_2)
    offs_m = first + gl.arange(0, BLOCK, VECTOR)
    gl.store(s_ptr + tile_k.to(gl.int64) * M + offs_m, scale, mask=offs_m < end)
    encode = gl.convert_layout(encode, gl.SliceLayout(1, ROW))[:, None]
    low, high = halves(words, B.dtype)
    q = encode_e4m3(gl.join(low * encode, high * encode).reshape([BLOCK, BLOCK]), B.element_max)
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, q.type.layout))[:, None]
    column = tile_k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, q.type.layout))[None, :]
    _store(q_ptr, q, row, column, end, K)


@gluon.jit
def _store_columnwise(
    tile,
    qt_ptr,  # [K, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, K] f32; SQUARE: [K/BLOCK, M/BLOCK]
    blocks_ptr,
    tile_m,
    first_k,  # the tile's first column
    K,
    width_qt,  # bytes of a row of qt: M and padding
    B: gl.constexpr,
):
    """Quantize the columns of a tile as `ops.quantize` does and store them."""
    BLOCK: gl.constexpr = B.block
    WORDS: gl.constexpr = B.tile_columns // 2
    COLUMN: gl.constexpr = _column_layout(B.warps)
    VECTOR: gl.constexpr = _vector_layout(B.warps)
    first_m = tile_m * BLOCK
    words = tile.load(COLUMN)
    low_amax, high_amax = _largest_halves(words, 0, B.dtype)
    # The copy may have no room for a tile of tokens after the last group.
    if B.square:
        amax = gl.max(gl.maximum(low_amax, high_amax), 0)
        low_encode, scale = fp8_scales(amax, B.element_max, B.min_amax, B.power_of_2)
        high_encode = low_encode
        scales = (first_k // BLOCK).to(gl.int64) * gl.cdiv(width_qt, BLOCK)
        gl.store(st_ptr + scales + tile_m, scale, mask=first_m < width_qt)
    else:
        amax = gl.join(low_amax, high_amax).reshape([2 * WORDS])
        of_columns = gl.convert_layout(amax, VECTOR)
        encode, scale = fp8_scales(of_columns, B.element_max, B.min_amax, B.power_of_2)
        offs_k = first_k + gl.arange(0, 2 * WORDS, VECTOR)
        columns = K
        if blocks_ptr is not None:
            columns = gl.where(first_m < width_qt, K, 0)
        gl.store(st_ptr + tile_m.to(gl.int64) * K + offs_k, scale, mask=offs_k < columns)
        low_encode, high_encode = gl.split(gl.convert_layout(encode, amax.type.layout).reshape([WORDS, 2]))
        low_encode = gl.convert_layout(low_encode, gl.SliceLayout(0, COLUMN))[None, :]
        high_encode = gl.convert_layout(high_encode, gl.SliceLayout(0, COLUMN))[None, :]
    low, high = halves(words, B.dtype)
    # Addresses transpose: rows of the output are columns of the tile.
    row = first_k + 2 * gl.arange(0, WORDS, gl.SliceLayout(0, COLUMN))[None, :]
    column = first_m + gl.arange(0, BLOCK, gl.SliceLayout(1, COLUMN))[:, None]
    _store(qt_ptr, encode_e4m3(low * low_encode, B.element_max), row, column, K, width_qt)
    _store(qt_ptr, encode_e4m3(high * high_encode, B.element_max), row + 1, column, K, width_qt)


@gluon.jit
def store_copies(
    tile,
    q_ptr,  # as in `_store_rowwise`, or None where only the columnwise copy is made
    s_ptr,
    qt_ptr,  # as in `_store_columnwise`
    st_ptr,
    blocks_ptr,
    tile_m,  # where in its matrix, [M, K], the tile is
    tile_k,
    first,  # its first row
    end,  # and its last, and one
    M,
    K,
    width_qt,
    B: gl.constexpr,
):
    """Quantize a tile, behind a barrier after what wrote it, and store its copies."""
    if q_ptr is not None:
        _store_rowwise(tile, q_ptr, s_ptr, tile_k, first, end, M, K, B)
    _store_columnwise(tile, qt_ptr, st_ptr, blocks_ptr, tile_m, tile_k * B.tile_columns, K, width_qt, B)


@dataclass(frozen=True, eq=False)
class Build:
    """The constants of a kernel. Launches tell builds apart by identity, so there is one object for equal constants."""

    dtype: gl.dtype  # of the matrix, before it is quantized
    columns: int  # of the matrix that a program computes
    warps: int
    parts: int  # of a tile that are computed one after the other, columns by columns
    x_dtype: gl.dtype  # of the inputs
    block: int
    element_max: float
    min_amax: float
    power_of_2: bool
    square: bool  # whether blocks of the columnwise copy are square

    @property
    def tile_columns(self) -> int:
        """Columns of a tile in shared memory: at most a block, whose rows it may store."""
        return min(self.columns, self.block)


_build = functools.cache(Build)


@functools.cache
def build_of(
    options: CastOptions,
    dtype: torch.dtype,
    columns: int,
    warps: int,
    parts: int = 1,
    x_dtype: torch.dtype | None = None,
) -> Build:
    """Return the build for a matrix of `dtype`, by default also the dtype of the inputs."""
    fmt, dtypes = options.fmt, (DTYPES[dtype], DTYPES[x_dtype or dtype])
    scales = fmt.block[1], fmt.element.max, fmt.min_amax, options.power_of_2_scales, options.columnwise_format.is_square
    return _build(dtypes[0], columns, warps, parts, dtypes[1], *scales)


def make_copies(
    kernel,
    inputs: tuple[torch.Tensor, ...],
    shape: tuple[int, int],
    options: CastOptions,
    groups: Groups | None,
    build: Build,
    vectors: tuple[torch.Tensor | None, ...] | None = None,
    **flags,
) -> Copies:
    """Return the requested copies, including the columnwise one, of the matrix of this shape that `kernel` computes.

    inputs: matrices [M, ..] of one dtype, for which `why_no_tiles` returns None.
    vectors: further arguments, after the inputs, of a kernel without groups; all others take a table of blocks last.
    """
    x, fmt = inputs[0], options.fmt
    copies = new_copies(x, shape, options, groups, padded=True)
    M, columns = x.shape
    if x.numel() > 0:
        blocks = None if groups is None else block_table(groups, M, fmt)
        tiles_m = ceil_div(M, fmt.block[1]) if blocks is None else blocks.shape[0] - 1
        behind = (*pointers(copies), blocks) if vectors is None else (*vectors, *pointers(copies))
        launch(
            kernel, tiles_m * ceil_div(shape[1], build.columns),
            *[(x, torch.int32) for x in inputs], *behind,
            M, columns, copies.columnwise.qdata.shape[1], *[x.stride(0) for x in inputs],
            B=build, num_warps=build.warps, **flags,
        )  # fmt: skip
    return as_asked(copies, M, options, groups)
