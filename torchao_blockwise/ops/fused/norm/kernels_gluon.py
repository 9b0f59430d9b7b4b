"""A norm's second pass in Gluon: y is computed into tiles in shared memory and quantized there (gluon_tiles.py)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.formats import CastOptions, Copies
from torchao_blockwise.ops.device.gluon_tiles import (
    Tiling,
    barrier,
    copy_layout,
    halves,
    joined,
    make_copies,
    new_tile,
    store_copies,
)
from torchao_blockwise.ops.fused.norm.values import Norm

# (parts of a tile, warps) of a program; measured on an H200.
BUILD = 1, 8


@gluon.jit
def _pair(ptr, word, K):
    """fp32 of a vector's elements of each word, those of the low halves and those of the high."""
    inside = word < K // 2
    low = gl.load(ptr + 2 * word, mask=inside, other=0.0).to(gl.float32)
    return low[None, :], gl.load(ptr + 2 * word + 1, mask=inside, other=0.0).to(gl.float32)[None, :]


@gluon.jit(do_not_specialize=["M"])
def _norm_quantize_kernel(
    x_ptr,  # [M, K/2] words of two elements
    mean_ptr,  # [M] f32, or None
    rstd_ptr,  # [M] f32
    weight_ptr,  # [K], or None
    bias_ptr,  # [K], or None
    q_ptr,  # [M, K] e4m3 bytes, or None where only the columnwise copy is made
    s_ptr,  # [K/BLOCK, M] f32, or None
    qt_ptr,  # [K, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, K] f32
    M,
    K,
    width_qt,  # bytes of a row of qt: M and padding
    stride_xm,  # in elements
    X_DTYPE: gl.constexpr,
    DTYPE: gl.constexpr,  # of y
    ELEMENT_MAX: gl.constexpr,
    MIN_AMAX: gl.constexpr,
    POWER_OF_2: gl.constexpr,
    BLOCK: gl.constexpr,
    PARTS: gl.constexpr,  # of a tile that are computed one after the other, columns by columns
    WARPS: gl.constexpr,
):
    WORDS: gl.constexpr = BLOCK // 2 // PARTS
    COPY: gl.constexpr = copy_layout(WORDS, WARPS)
    tiles_k = gl.cdiv(K, BLOCK)
    tile_m, tile_k = gl.program_id(0) // tiles_k, gl.program_id(0) % tiles_k
    first = tile_m * BLOCK
    tile = new_tile(BLOCK, BLOCK)
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, COPY))
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
    rstd = gl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    for part in gl.static_range(PARTS):
        word = (tile_k * PARTS + part) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))
        inside = (row < M)[:, None] & (word < K // 2)[None, :]
        x = gl.load(x_ptr + row.to(gl.int64)[:, None] * (stride_xm // 2) + word[None, :], mask=inside, other=0)
        low, high = halves(x, X_DTYPE)
        if mean_ptr is not None:
            low, high = low - mean, high - mean
        low, high = low * rstd, high * rstd
        if weight_ptr is not None:
            low_weight, high_weight = _pair(weight_ptr, word, K)
            low, high = low * low_weight, high * high_weight
        if bias_ptr is not None:
            low_bias, high_bias = _pair(bias_ptr, word, K)
            low, high = low + low_bias, high + high_bias
        # A bias, or a row of NaN, would reach blocks from beside the matrix.
        y = gl.where(inside, joined(low, high, DTYPE), 0)
        tile.slice(part * WORDS, WORDS, 1).store(y)
    barrier()
    store_copies(
        tile, q_ptr, s_ptr, qt_ptr, st_ptr, None, tile_m, tile_k, first, M, M, K, width_qt,
        DTYPE, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, WARPS,
    )  # fmt: skip


def norm_quantize(norm: Norm, options: CastOptions) -> Copies:
    """Arguments and result as in the op, bit for bit, within what `gluon_tiles.why_not` admits."""
    x, vectors = norm.x, (norm.mean, norm.rstd, norm.weight, norm.bias)
    parts, warps = BUILD
    constants = {"X_DTYPE": x.dtype, "PARTS": parts, "enable_fp_fusion": False}
    tiling = Tiling(norm.dtype, options.fmt.block[1], warps, constants)
    vectors = tuple(None if t is None else t.contiguous() for t in vectors)
    return make_copies(_norm_quantize_kernel, (x,), x.shape, options, None, tiling, vectors)
