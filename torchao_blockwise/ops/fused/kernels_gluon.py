"""Norms, SwiGLU and its gradients in Gluon, computed into tiles in shared memory and quantized there (gluon_tiles.py).

    norm        x tile, given the statistics ─▶ y ─▶ its copies
    forward     gate, up tile ─▶ h ─▶ its copies
    backward    dh, gate, up tile ─▶ dgate ─▶ its copies      from one read; columns of dup come H columns after
                                  └▶ dup   ─▶ its copies      those of dgate

If H is not a multiple of a block, one block of the merged gradient [M, 2H] contains parts of both. Then a program
computes one tile of this gradient, so that each input is read twice.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.formats import CastOptions, Copies, Groups
from torchao_blockwise.ops.device.gluon_tiles import (
    barrier,
    build_of,
    copy_layout,
    halves,
    joined,
    make_copies,
    new_tile,
    store_copies,
)
from torchao_blockwise.ops.device.groups import locate_rows
from torchao_blockwise.ops.fused import Norm
from torchao_blockwise.ops.fused.kernels_triton import silu_times, swiglu_gradients

# (parts of a tile, warps) of a norm, of SwiGLU and of its gradients; measured on an H200.
NORM, FORWARD, BACKWARD = (1, 8), (2, 4), (2, 16)


@gluon.jit
def _pair(ptr, word, K):
    """Elements of a vector that belong to the low and to the high half of each word, in fp32."""
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
    st_ptr,  # [M/BLOCK, K] f32; B.square: [K/BLOCK, M/BLOCK]
    M,
    K,
    width_qt,  # bytes of a row of qt: M and padding
    stride_xm,  # in elements
    B: gl.constexpr,  # a Build
):
    WORDS: gl.constexpr = B.block // 2 // B.parts
    COPY: gl.constexpr = copy_layout(WORDS, B.warps)
    tiles_k = gl.cdiv(K, B.block)
    tile_m, tile_k = gl.program_id(0) // tiles_k, gl.program_id(0) % tiles_k
    first = tile_m * B.block
    tile = new_tile(B)
    row = first + gl.arange(0, B.block, gl.SliceLayout(1, COPY))
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
    rstd = gl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    PARTS: gl.constexpr = B.parts
    for part in gl.static_range(PARTS):
        word = (tile_k * B.parts + part) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))
        inside = (row < M)[:, None] & (word < K // 2)[None, :]
        x = gl.load(x_ptr + row.to(gl.int64)[:, None] * (stride_xm // 2) + word[None, :], mask=inside, other=0)
        low, high = halves(x, B.x_dtype)
        if mean_ptr is not None:
            low, high = low - mean, high - mean
        low, high = low * rstd, high * rstd
        if weight_ptr is not None:
            low_weight, high_weight = _pair(weight_ptr, word, K)
            low, high = low * low_weight, high * high_weight
        if bias_ptr is not None:
            low_bias, high_bias = _pair(bias_ptr, word, K)
            low, high = low + low_bias, high + high_bias
        # Otherwise, a bias or NaN would affect blocks from outside the matrix.
        y = gl.where(inside, joined(low, high, B.dtype), 0)
        tile.slice(part * WORDS, WORDS, 1).store(y)
    barrier()
    store_copies(tile, q_ptr, s_ptr, qt_ptr, st_ptr, None, tile_m, tile_k, first, M, M, K, width_qt, B)


def norm_quantize(norm: Norm, options: CastOptions) -> Copies:
    """Arguments and result as in the op, if `why_no_tiles` returns None."""
    x, vectors = norm.x, (norm.mean, norm.rstd, norm.weight, norm.bias)
    parts, warps = NORM
    build = build_of(options, norm.dtype, options.fmt.block[1], warps, parts, x.dtype)
    vectors = tuple(None if t is None else t.contiguous() for t in vectors)
    return make_copies(_norm_quantize_kernel, (x,), x.shape, options, None, build, vectors, enable_fp_fusion=False)


@gluon.jit
def _load(ptr, row, word, live, H, stride):
    """Words of a tile, zeros from row `live` on and outside the matrix."""
    return gl.load(ptr + row.to(gl.int64) * (stride // 2) + word, mask=(row < live) & (word < H // 2), other=0)


@gluon.jit(do_not_specialize=["M"])
def _swiglu_kernel(
    gate_ptr,  # [M, H/2] words of two elements
    up_ptr,  # [M, H/2]
    q_ptr,  # [M, H] e4m3 bytes, or None where only the columnwise copy is made
    s_ptr,  # [H/BLOCK, M] f32, or None
    qt_ptr,  # [H, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, H] f32; B.square: [H/BLOCK, M/BLOCK]
    blocks_ptr,  # None, or where tokens lie in groups their table
    M,
    H,
    width_qt,  # bytes of a row of qt: M and padding
    stride_g,  # of rows, in elements
    stride_u,
    B: gl.constexpr,  # a Build
):
    WORDS: gl.constexpr = B.block // 2 // B.parts
    COPY: gl.constexpr = copy_layout(WORDS, B.warps)
    tiles_h = gl.cdiv(H, B.block)
    tile_m, tile_h = gl.program_id(0) // tiles_h, gl.program_id(0) % tiles_h
    first, live, end = locate_rows(blocks_ptr, tile_m, M, B.block, True)
    tile = new_tile(B)
    row = first + gl.arange(0, B.block, gl.SliceLayout(1, COPY))[:, None]
    PARTS: gl.constexpr = B.parts
    for part in gl.static_range(PARTS):
        word = (tile_h * B.parts + part) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
        gates = halves(_load(gate_ptr, row, word, live, H, stride_g), B.dtype)
        ups = halves(_load(up_ptr, row, word, live, H, stride_u), B.dtype)
        h = joined(silu_times(gates[0], ups[0]), silu_times(gates[1], ups[1]), B.dtype)
        tile.slice(part * WORDS, WORDS, 1).store(h)
    barrier()
    store_copies(tile, q_ptr, s_ptr, qt_ptr, st_ptr, blocks_ptr, tile_m, tile_h, first, end, M, H, width_qt, B)


@gluon.jit(do_not_specialize=["M"])
def _swiglu_backward_kernel(
    dh_ptr,  # [M, H/2] words of two elements
    gate_ptr,  # [M, H/2]
    up_ptr,  # [M, H/2]
    q_ptr,  # copies as above, of the gradient [M, 2H]
    s_ptr,
    qt_ptr,
    st_ptr,
    blocks_ptr,
    M,
    H,
    width_qt,
    stride_d,
    stride_g,
    stride_u,
    B: gl.constexpr,  # a Build
):
    WORDS: gl.constexpr = B.block // 2 // B.parts
    COPY: gl.constexpr = copy_layout(WORDS, B.warps)
    # H is a multiple of a block: no block of the gradient holds parts of both.
    WHOLE_BLOCKS: gl.constexpr = B.columns > B.block
    tiles_c = gl.cdiv(H if WHOLE_BLOCKS else 2 * H, B.block)
    tile_m, tile_c = gl.program_id(0) // tiles_c, gl.program_id(0) % tiles_c
    first, live, end = locate_rows(blocks_ptr, tile_m, M, B.block, True)
    tile = new_tile(B)
    if WHOLE_BLOCKS:
        up_tile = new_tile(B)
    row = first + gl.arange(0, B.block, gl.SliceLayout(1, COPY))[:, None]
    PARTS: gl.constexpr = B.parts
    for part in gl.static_range(PARTS):
        word = (tile_c * B.parts + part) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
        if not WHOLE_BLOCKS:
            # Columns of the gradient from H on are those of `up`; outside are none.
            of_up = word >= H // 2
            word = gl.where(of_up, word - H // 2, word)
        dhs = halves(_load(dh_ptr, row, word, live, H, stride_d), B.dtype)
        gates = halves(_load(gate_ptr, row, word, live, H, stride_g), B.dtype)
        ups = halves(_load(up_ptr, row, word, live, H, stride_u), B.dtype)
        low_gate, low_up = swiglu_gradients(dhs[0], gates[0], ups[0])
        high_gate, high_up = swiglu_gradients(dhs[1], gates[1], ups[1])
        of_gate, of_ups = joined(low_gate, high_gate, B.dtype), joined(low_up, high_up, B.dtype)
        if WHOLE_BLOCKS:
            tile.slice(part * WORDS, WORDS, 1).store(of_gate)
            up_tile.slice(part * WORDS, WORDS, 1).store(of_ups)
        else:
            tile.slice(part * WORDS, WORDS, 1).store(gl.where(of_up, of_ups, of_gate))
    barrier()
    store_copies(tile, q_ptr, s_ptr, qt_ptr, st_ptr, blocks_ptr, tile_m, tile_c, first, end, M, 2 * H, width_qt, B)
    if WHOLE_BLOCKS:
        tile_c += tiles_c
        store_copies(
            up_tile, q_ptr, s_ptr, qt_ptr, st_ptr, blocks_ptr, tile_m, tile_c, first, end, M, 2 * H, width_qt, B
        )


def swiglu_quantize(gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None) -> Copies:
    """Arguments and result as in the op, if `why_no_tiles` returns None."""
    parts, warps = FORWARD
    build = build_of(options, gate.dtype, options.fmt.block[1], warps, parts)
    return make_copies(_swiglu_kernel, (gate, up), gate.shape, options, groups, build, enable_fp_fusion=False)


def swiglu_backward_quantize(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None
) -> Copies:
    """Arguments and result as in the op, if `why_no_tiles` returns None."""
    (M, H), block, (parts, warps) = gate.shape, options.fmt.block[1], BACKWARD
    # A block of dgate and one of dup, or one of the merged gradient.
    build = build_of(options, gate.dtype, block if H % block else 2 * block, warps, parts)
    inputs, shape = (dh, gate, up), (M, 2 * H)
    return make_copies(_swiglu_backward_kernel, inputs, shape, options, groups, build, enable_fp_fusion=False)
