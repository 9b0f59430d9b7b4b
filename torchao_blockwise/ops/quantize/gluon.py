"""Copies of one-row FP8 blocks from one read, in Gluon: a tile lies in shared memory and is read in a layout a copy.

    x  [M, K] ──cp.async──▶ tile 128×128, as words of two neighbours of a row
                              │
                              ├─ by rows      a thread has 16 neighbours of a row
                              │               max along the row  → scale, q  [M, K], 16 bytes a store
                              └─ by columns   a thread has 16 rows of a word, so of two columns
                                              max along the rows → scale, qᵀ [K, M], 16 bytes a store

What is stored transposed is read transposed, so nothing is transposed through registers, and one set of values is alive
at a time. A launch each reads `x` twice; one launch that keeps the tile in registers holds two sets of scaled values.
For the columnwise copy alone the rows are left out, and tiles may be narrower.

Two elements of 16 bits share a word: they are loaded and compared together (`max.u16x2`, from sm_90 on). Words of a row
are swizzled by the row's sixteenth, so that reading by columns meets no bank twice; reading by rows meets each twice.

Tiles are numbered along grid x alone. Only whole words of 16 bytes are read and written: see `why_not`; where tokens do
not fill those of the columnwise copy, zeros do (ops/padding.py). Of tokens in groups a tile is a block of their table
(triton_group_blocks.py), which begins at any row and is stored columnwise on a multiple of 128.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchao_blockwise.formats import FP8_1X128, BlockFormat
from torchao_blockwise.ops.backend import compute_capability, interpreting
from torchao_blockwise.ops.launch import Launch, ceil_div
from torchao_blockwise.ops.padding import padded_size
from torchao_blockwise.ops.triton_elements import encode_e4m3
from torchao_blockwise.ops.triton_group_blocks import load_block
from torchao_blockwise.ops.triton_scales import fp8_scales

# Its name moved in Triton 3.7, that of the copy in 3.8.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_MIN_CAPABILITY = (9, 0)
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Elements of a store of payload, and what an address must be a multiple of: 16 bytes.
_RUN = 16
_RUN_BYTES = 16
_THREADS = 32  # of a warp
_MAGNITUDES = gl.constexpr(0x7FFF7FFF)
_HIGH = gl.constexpr(-(1 << 16))


@gluon.constexpr_function
def _copy_layout(words, warps):
    """Words as cp.async takes them: 16 bytes a thread, neighbours along a row of so many."""
    return gl.BlockedLayout([1, 4], [_THREADS * 4 // words, words // 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def _row_layout(warps):
    """Words by rows: a run of a row a thread, 8 threads a row."""
    return gl.BlockedLayout([1, _RUN // 2], [_THREADS // 8, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _column_layout(warps):
    """Words by columns: a run of rows a thread, 8 threads a column of words, so of 128 rows."""
    return gl.BlockedLayout([_RUN, 1], [8, _THREADS // 8], [1, warps], [0, 1])


@gluon.constexpr_function
def _vector_layout(warps):
    """A value a thread: what is computed once a block, not once in each thread that has a part of it."""
    return gl.BlockedLayout([1], [_THREADS], [warps], [0])


@gluon.jit
def _larger_halves(a, b):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _halves(words, DTYPE: gl.constexpr):
    """fp32 of the low and of the high half of each word: elements 2i and 2i + 1."""
    if DTYPE.is_bf16():
        # The upper half of an fp32: one instruction an element, where a conversion of 16 bits takes two.
        return (words << 16).to(gl.float32, bitcast=True), (words & _HIGH).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
        return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def _largest_halves(words, axis: gl.constexpr, DTYPE: gl.constexpr):
    """Bits of max |x| along `axis`, of low and of high halves, in fp32. As integers they keep NaN above all."""
    low, high = _halves(gl.reduce(words & _MAGNITUDES, axis, _larger_halves), DTYPE)
    return low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True)


@gluon.jit
def _store(ptr, values, row, column, rows, columns):
    """Store `values` at (row, column) of a contiguous [rows, columns]; row: [R, 1], column: [1, C]."""
    mask = (row < rows) & (column < columns)
    gl.store(ptr + row.to(gl.int64) * columns + column, values, mask=mask)


# Tokens count for masks alone, which are the same along a store.
@gluon.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,  # [M, K/2] words of two elements
    q_ptr,  # [M, K] e4m3 bytes, or None where only the columnwise copy is made
    s_ptr,  # [K/BLOCK, M] f32, or None
    qt_ptr,  # [K, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, K] f32
    blocks_ptr,  # None, or where tokens lie in groups their table
    M,
    K,
    width_qt,  # bytes of a row of qt: M and padding
    stride_xm,  # in elements
    DTYPE: gl.constexpr,
    ELEMENT_MAX: gl.constexpr,
    MIN_AMAX: gl.constexpr,
    POWER_OF_2: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,  # of a tile: with a rowwise copy a block
    WARPS: gl.constexpr,
):
    WORDS: gl.constexpr = COLUMNS // 2
    COPY: gl.constexpr = _copy_layout(WORDS, WARPS)
    ROW: gl.constexpr = _row_layout(WARPS)
    COLUMN: gl.constexpr = _column_layout(WARPS)
    VECTOR: gl.constexpr = _vector_layout(WARPS)
    # 16 bytes stay together; every 16th row, where another thread of a column's 8 begins, takes other banks.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 16, 8, [1, 0])

    tiles_k = gl.cdiv(K, COLUMNS)
    tile_m, tile_k = gl.program_id(0) // tiles_k, gl.program_id(0) % tiles_k
    first_m, first_k = tile_m * BLOCK, tile_k * COLUMNS
    # Rows of `x` and of the rowwise copy: those before `live` have values, up to `end` they are zeros.
    first_x, live, end = first_m, M, M
    if blocks_ptr is not None:
        first_x, live, end = load_block(blocks_ptr, tile_m)

    tile = gl.allocate_shared_memory(gl.int32, [BLOCK, WORDS], SHARED)
    row = first_x + gl.arange(0, BLOCK, gl.SliceLayout(1, COPY))[:, None]
    word = first_k // 2 + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
    addresses = x_ptr + row.to(gl.int64) * (stride_xm // 2) + word
    # What a mask leaves out is zero.
    _load_async(tile, addresses, mask=(row < live) & (word < K // 2))
    async_copy.commit_group()
    async_copy.wait_group(0)
    _barrier()

    if q_ptr is not None:
        words = tile.load(ROW)
        low_amax, high_amax = _largest_halves(words, 1, DTYPE)
        amax = gl.convert_layout(gl.maximum(low_amax, high_amax), VECTOR)
        encode, scale = fp8_scales(amax, ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
        offs_x = first_x + gl.arange(0, BLOCK, VECTOR)
        gl.store(s_ptr + tile_k.to(gl.int64) * M + offs_x, scale, mask=offs_x < end)
        encode = gl.convert_layout(encode, gl.SliceLayout(1, ROW))[:, None]
        low, high = _halves(words, DTYPE)
        q = encode_e4m3(gl.join(low * encode, high * encode).reshape([BLOCK, BLOCK]), ELEMENT_MAX)
        row = first_x + gl.arange(0, BLOCK, gl.SliceLayout(1, q.type.layout))[:, None]
        column = first_k + gl.arange(0, BLOCK, gl.SliceLayout(0, q.type.layout))[None, :]
        _store(q_ptr, q, row, column, end, K)

    words = tile.load(COLUMN)
    low_amax, high_amax = _largest_halves(words, 0, DTYPE)
    amax = gl.join(low_amax, high_amax).reshape([COLUMNS])
    encode, scale = fp8_scales(gl.convert_layout(amax, VECTOR), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    offs_k = first_k + gl.arange(0, COLUMNS, VECTOR)
    columns = K
    if blocks_ptr is not None:
        # Tokens of no group may fill a tile that the copy has no room for.
        columns = gl.where(first_m < width_qt, K, 0)
    gl.store(st_ptr + tile_m.to(gl.int64) * K + offs_k, scale, mask=offs_k < columns)
    low_encode, high_encode = gl.split(gl.convert_layout(encode, amax.type.layout).reshape([WORDS, 2]))
    low_encode = gl.convert_layout(low_encode, gl.SliceLayout(0, COLUMN))[None, :]
    high_encode = gl.convert_layout(high_encode, gl.SliceLayout(0, COLUMN))[None, :]
    low, high = _halves(words, DTYPE)
    # Transposed by their addresses: rows of the output are columns of the tile.
    row = first_k + 2 * gl.arange(0, WORDS, gl.SliceLayout(0, COLUMN))[None, :]
    column = first_m + gl.arange(0, BLOCK, gl.SliceLayout(1, COLUMN))[:, None]
    _store(qt_ptr, encode_e4m3(low * low_encode, ELEMENT_MAX), row, column, K, width_qt)
    _store(qt_ptr, encode_e4m3(high * high_encode, ELEMENT_MAX), row + 1, column, K, width_qt)


def why_not(x: torch.Tensor, fmt: BlockFormat) -> str | None:
    """Why this kernel cannot quantise `x`, or None if it can."""
    if interpreting():
        return "Triton's interpreter does not know Gluon"
    capability = compute_capability(x.device)
    if capability < _MIN_CAPABILITY:
        return "the kernel needs sm_{}{} or newer, got sm_{}{}".format(*_MIN_CAPABILITY, *capability)
    return _why_not_this(x, fmt)


def _why_not_this(x: torch.Tensor, fmt: BlockFormat) -> str | None:
    if fmt is not FP8_1X128:
        return f"the kernel makes {FP8_1X128.name}, got {fmt.name}"
    if x.dtype not in _DTYPES:
        return f"the kernel takes elements of 16 bits, got {x.dtype}"
    if x.dim() != 2:
        return f"the kernel takes one matrix, got shape {list(x.shape)}"
    if x.shape[1] % _RUN or x.stride(0) % _RUN or x.stride(1) != 1 or x.data_ptr() % _RUN_BYTES:
        return (
            f"the kernel takes K and a stride of rows that are multiples of {_RUN}, from an address on {_RUN_BYTES} "
            f"bytes on, got shape {list(x.shape)}, strides {list(x.stride())}, address {x.data_ptr():#x}"
        )
    return None


def quantize_both(
    x: torch.Tensor,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    warps: int,
    blocks: torch.Tensor | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qdata, scale, columnwise qdata, columnwise scale) of `ops.quantize`, padded, bit for bit; see `why_not`.

    blocks: a table of `group_blocks`, of tokens in groups; their columnwise copy is padded to so many `rows`.
    """
    q, s = fmt.new_empty(x, *x.shape)
    columnwise = _quantize(x, (q, torch.uint8), s, fmt, power_of_2_scales, fmt.block[1], warps, blocks, rows)
    return q, s, *columnwise


def quantize_columnwise(
    x: torch.Tensor,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    columns: int,
    warps: int,
    blocks: torch.Tensor | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columnwise copy alone, as `quantize_both` makes it, in tiles of so many columns."""
    return _quantize(x, None, None, fmt, power_of_2_scales, columns, warps, blocks, rows)


def _quantize(x, q, s, fmt, power_of_2_scales, columns, warps, blocks, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the columnwise copy, and fill the rowwise one (q, s) where there is one."""
    M, K = x.shape
    qt, st = fmt.new_empty(x, K, padded_size(M, fmt) if rows is None else rows)
    if x.numel() > 0:
        tiles_m = ceil_div(M, fmt.block[1]) if blocks is None else blocks.shape[0] - 1
        sizes = tiles_m, M, K, qt.shape[1], x.stride(0)
        launch = _launch_of(*sizes, x.dtype, fmt, power_of_2_scales, columns, warps)
        launch(_quantize_kernel, (x, torch.int32), q, s, (qt, torch.uint8), st, blocks)
    return qt, st


@functools.lru_cache(maxsize=4096)
def _launch_of(
    tiles_m: int,
    M: int,
    K: int,
    width_qt: int,
    stride_xm: int,
    dtype: torch.dtype,
    fmt: BlockFormat,
    power_of_2_scales: bool,
    columns: int,
    warps: int,
) -> Launch:
    return Launch(
        tiles_m * ceil_div(K, columns), M, K, width_qt, stride_xm,
        DTYPE=_DTYPES[dtype], ELEMENT_MAX=fmt.element.max, MIN_AMAX=fmt.min_amax, POWER_OF_2=power_of_2_scales,
        BLOCK=fmt.block[1], COLUMNS=columns, WARPS=warps, num_warps=warps,
    )  # fmt: skip
