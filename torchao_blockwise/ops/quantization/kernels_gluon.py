"""Copies of FP8 blocks, rows or columnwise squares, from one read, in Gluon: see ops/device/gluon_tiles.py.

    x  [M, K] ──cp.async──▶ tile 128×128 ─▶ rowwise and columnwise copies

Two launches would read `x` twice, and one launch with the tile in registers would hold two sets of scaled values. If
only the columnwise copy is requested, tiles may be narrower.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies, Groups
from torchao_blockwise.ops.device.gluon_tiles import barrier, build_of, copy_layout, make_copies, new_tile, store_copies
from torchao_blockwise.ops.device.groups import locate_rows

# (columns of a tile, warps) for both copies, 1.4 times as fast as two launches on an H200, and for one copy.
BOTH = (FP8_1X128.block[1], 4)
COLUMNWISE = (64, 4)
# Its name moved in Triton 3.8.
_load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


# The number of tokens is used only for masks, which are the same along a store.
@gluon.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,  # [M, K/2] words of two elements
    q_ptr,  # [M, K] e4m3 bytes, or None where only the columnwise copy is made
    s_ptr,  # [K/BLOCK, M] f32, or None
    qt_ptr,  # [K, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, K] f32; B.square: [K/BLOCK, M/BLOCK]
    blocks_ptr,  # None, or where tokens lie in groups their table
    M,
    K,
    width_qt,  # bytes of a row of qt: M and padding
    stride_xm,  # in elements
    B: gl.constexpr,  # a Build
):
    WORDS: gl.constexpr = B.columns // 2
    COPY: gl.constexpr = copy_layout(WORDS, B.warps)
    tiles_k = gl.cdiv(K, B.columns)
    tile_m, tile_k = gl.program_id(0) // tiles_k, gl.program_id(0) % tiles_k
    first, live, end = locate_rows(blocks_ptr, tile_m, M, B.block, True)

    tile = new_tile(B)
    row = first + gl.arange(0, B.block, gl.SliceLayout(1, COPY))[:, None]
    word = tile_k * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
    addresses = x_ptr + row.to(gl.int64) * (stride_xm // 2) + word
    # What a mask leaves out is zero.
    _load_async(tile, addresses, mask=(row < live) & (word < K // 2))
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    store_copies(tile, q_ptr, s_ptr, qt_ptr, st_ptr, blocks_ptr, tile_m, tile_k, first, end, M, K, width_qt, B)


def quantize(
    x: torch.Tensor, amax_bits: None, options: CastOptions, groups: Groups | None = None, *_: object
) -> Copies:
    """Arguments and result as in the op, if `why_no_tiles` returns None."""
    columns, warps = BOTH if options.rowwise or options.columnwise_format.is_square else COLUMNWISE
    build = build_of(options, x.dtype, columns, warps)
    return make_copies(_quantize_kernel, (x,), x.shape, options, groups, build)
