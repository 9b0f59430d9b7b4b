"""Blockwise quantization in Triton: one read of `x` writes one copy, or both if blocks are square.

A program quantizes one tile of a matrix, which consists of whole blocks:

            K                     rowwise                    columnwise
      ┌───┬───┬───┐               q  [M, K]   tile as it is   qᵀ [K, M]   tile transposed through shared memory
    M │   │ x │   │  one tile →   1×B blocks: max along K     1×B blocks: max along M
      └───┴───┴───┘               B×B blocks: one max over the block, and both copies share the payload

FP8: a tile is as long as a block (128) in the direction of blocks. With one-row blocks, each copy takes a launch,
because a tile in registers with two sets of scaled values would spill. NVFP4: a tile contains many blocks of 16, as a
reshaped view; two codes are packed in a byte along the last dim of each copy. The kernels are in kernels_nvfp4.py, and
for columnwise copies with one-row blocks in kernels_chunks.py.

Columnwise payload is stored 16 bytes at a time for any M, because its rows are padded with zeros (ops/padding.py).

Tiles are numbered along grid x only, whose limit is 2^31 (that of y and z is 65535). `M` is specialized on divisibility
by 16, which reads of 16 bytes along M (of a transposed `x`) need. So a kernel has two builds for all token counts
(three with M = 1).

Groups of tokens (ops/groups): a table contains the rows of each block and how many of them have values; rows after the
last group count as zeros. For the padded copy, M is the padded size. Its blocks start reading at any row, because
groups start anywhere, but still write at multiples of 16.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, CastOptions, Copies, Groups, Place
from torchao_blockwise.ops.device.elements import encode_e4m3, largest_magnitude, to_f32
from torchao_blockwise.ops.device.groups import load_block
from torchao_blockwise.ops.device.scales import fp8_scales, fp8_vector_scales
from torchao_blockwise.ops.device.tiles import load_values, locate_tile, matrices_of, store_tile
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import as_asked, new_copies, pointers
from torchao_blockwise.ops.padding import ROW_BYTES
from torchao_blockwise.ops.quantization.kernels_nvfp4 import write_nvfp4

# (tile rows, tile columns, warps, warps if rows of K elements do not start at multiples of 16 bytes), measured on an
# H200 with benchmarks/tune_quantize.py of commit d352a7a. With one-row blocks along K, any tile height works, and with
# those along M, any width. The best tile depends on the number of warps that fit in a multiprocessor and, if a
# reduction along M crosses warps, on the rows of each warp. Unaligned rows are moved one element at a time with
# separate addresses, which needs more threads to have enough registers.
_FP8_ROWWISE_TILE = (32, 128, 4, 16)
_FP8_COLUMNWISE_TILE = (128, 64, 4, 8)
_FP8_SQUARE_TILE = (128, 128, 4, 16)


@triton.jit
def _quantize_rows(
    x_ptr, q_ptr, s_ptr, batch, first, end_x, offs_k, M, K, stride_xb, stride_xm, stride_xk,
    ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows from `first` on, at columns `offs_k`, with zeros from row `end_x` on. Each row is a block.

    s_ptr: [M], the scales of these columns.
    """
    offs_m = first + tl.arange(0, ROWS)
    x = load_values(x_ptr, offs_m, offs_k, end_x, K, stride_xm, stride_xk, batch, stride_xb)
    encode, scale = fp8_vector_scales(largest_magnitude(x, 1), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    store_tile(q_ptr, encode_e4m3(to_f32(x) * encode[:, None], ELEMENT_MAX), offs_m, offs_k, M, K, batch)
    tl.store(s_ptr + offs_m, scale, mask=offs_m < M)


@triton.jit
def _quantize_columns(
    x_ptr, qt_ptr, st_ptr, batch, offs_x, end_x, offs_m, first, width_qt, K, stride_xb, stride_xm, stride_xk,
    ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize COLUMNS columns from `first` on, at rows `offs_m`. Each column is a block.

    They are rows `offs_x` of `x`, with zeros from row `end_x` on. st_ptr: [K], the scales of these rows.
    """
    offs_k = first + tl.arange(0, COLUMNS)
    x = load_values(x_ptr, offs_x, offs_k, end_x, K, stride_xm, stride_xk, batch, stride_xb)
    encode, scale = fp8_vector_scales(largest_magnitude(x, 0), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    qt = tl.trans(encode_e4m3(to_f32(x) * encode[None, :], ELEMENT_MAX))
    store_tile(qt_ptr, qt, offs_k, offs_m, K, width_qt, batch)
    tl.store(st_ptr + offs_k, scale, mask=offs_k < K)


@triton.jit
def _quantize_fp8_kernel(
    x_ptr,  # [B, M, K] bf16 | f16 | f32
    q_ptr,  # [B, M, K] e4m3 bytes
    s_ptr,  # [B, K/BLOCK, M] f32, or [B, M/BLOCK, K/BLOCK] where SQUARE
    qt_ptr,  # [B, K, width_qt] e4m3 bytes
    st_ptr,  # [B, M/BLOCK, K] f32, or [B, K/BLOCK, M/BLOCK] where SQUARE
    blocks_ptr,  # the table of blocks of groups (device/groups.py), B = 1; None without groups
    M,
    K,
    width_qt,  # bytes of a row of qt, M and padding, or None
    stride_xb,
    stride_xm,
    stride_xk,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BATCHED: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    batch, tile_m, tile_k, tiles_m, tiles_k = locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, BATCHED)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_k = tile_k * TILE_K + tl.arange(0, TILE_K)
    # The tile's rows in `x`. Those from `end_x` on are zeros.
    offs_x, end_x = offs_m, M
    if blocks_ptr is not None:
        first_x, end_x, _ = load_block(blocks_ptr, tile_m if COLUMNWISE else -1)
        if COLUMNWISE:
            offs_x = first_x + tl.arange(0, TILE_M)

    if SQUARE:
        x = load_values(x_ptr, offs_x, offs_k, end_x, K, stride_xm, stride_xk, batch, stride_xb)
        encode, scale = fp8_scales(tl.max(largest_magnitude(x, 1), 0), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
        q = encode_e4m3(to_f32(x) * encode, ELEMENT_MAX)
        if ROWWISE:
            store_tile(q_ptr, q, offs_m, offs_k, M, K, batch)
            tl.store(s_ptr + (batch * tiles_m + tile_m) * tiles_k + tile_k, scale)
        if COLUMNWISE:
            store_tile(qt_ptr, tl.trans(q), offs_k, offs_m, K, width_qt, batch)
            if blocks_ptr is None:
                tl.store(st_ptr + (batch * tiles_k + tile_k) * tiles_m + tile_m, scale)
            else:
                # The copy may have no room for a tile of tokens after the last group.
                tiles_m = tl.cdiv(width_qt, TILE_M)
                tl.store(st_ptr + tile_k * tiles_m + tile_m, scale, mask=tile_m < tiles_m)
    elif ROWWISE:
        s_ptr += (batch * tiles_k + tile_k) * M
        _quantize_rows(
            x_ptr, q_ptr, s_ptr, batch, tile_m * TILE_M, end_x, offs_k, M, K,
            stride_xb, stride_xm, stride_xk, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, TILE_M,
        )  # fmt: skip
    else:
        st_ptr += (batch * tiles_m + tile_m) * K
        _quantize_columns(
            x_ptr, qt_ptr, st_ptr, batch, offs_x, end_x, offs_m, tile_k * TILE_K, width_qt, K,
            stride_xb, stride_xm, stride_xk, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, TILE_K,
        )  # fmt: skip


def quantize(
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    options: CastOptions,
    groups: Groups | None = None,
    key: torch.Tensor | None = None,
    place: Place | None = None,
) -> Copies:
    """Arguments and result as in the op."""
    fmt = options.fmt
    copies = new_copies(x, x.shape, options, groups, padded=True)
    if x.numel() > 0:
        blocks = None if groups is None else block_table(groups, x.shape[0], fmt)
        if fmt.element is E2M1:
            assert amax_bits is not None
            write_nvfp4(x, amax_bits.view(torch.float32), copies, options, groups, blocks, key, place or Place())
        elif copies.rowwise and copies.columnwise and (x.shape[-1] % ROW_BYTES or not fmt.is_square):
            # A program with two sets of values or addresses spills, or few of them fit in a multiprocessor.
            _write_fp8(x, copies._replace(columnwise=None), options, blocks)
            _write_fp8(x, copies._replace(rowwise=None), options, blocks)
        else:
            _write_fp8(x, copies, options, blocks)
    return as_asked(copies, x.shape[-2], options, groups)


def _write_fp8(x: torch.Tensor, copies: Copies, options: CastOptions, blocks: torch.Tensor | None) -> None:
    """Write these copies of `x` [.., M, K] in one launch. blocks: the table of blocks of groups, or None."""
    fmt, (*_, M, K) = options.fmt, x.shape
    x, B, strides = matrices_of(x)
    rowwise, columnwise = copies.rowwise is not None, copies.columnwise is not None
    square = options.columnwise_format.is_square if columnwise else fmt.is_square
    rows_tile = _FP8_COLUMNWISE_TILE if columnwise else _FP8_ROWWISE_TILE
    tile_m, tile_k, *warps = _FP8_SQUARE_TILE if square else rows_tile
    width_qt = copies.columnwise.qdata.shape[-1] if columnwise else None
    if columnwise and blocks is not None:
        M = width_qt
    launch(
        _quantize_fp8_kernel, B * ceil_div(M, tile_m) * ceil_div(K, tile_k),
        x, *pointers(copies), blocks, M, K, width_qt, *strides,
        ELEMENT_MAX=fmt.element.max, MIN_AMAX=fmt.min_amax, POWER_OF_2=options.power_of_2_scales, BATCHED=B > 1,
        SQUARE=square, ROWWISE=rowwise, COLUMNWISE=columnwise,
        TILE_M=tile_m, TILE_K=tile_k, num_warps=warps[K % ROW_BYTES != 0],
    )  # fmt: skip
