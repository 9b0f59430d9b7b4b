"""NVFP4 copies in Triton: rowwise ones, rounded to nearest or by random bits, and both copies of square blocks.

A tile contains many blocks of 16, as a reshaped view; two codes are packed in a byte along the last dim of each copy.
Columnwise copies with one-row blocks are computed from chunks (kernels_chunks.py).
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import CastOptions, Copies, Groups, Operand, Place
from torchao_blockwise.ops.device.elements import encode_e2m1, encode_e2m1_stochastically, magnitude_bits
from torchao_blockwise.ops.device.groups import groups_of, load_block
from torchao_blockwise.ops.device.scales import nvfp4_scales
from torchao_blockwise.ops.device.tiles import load_tile, locate_tile, matrices_of, store_tile
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import pointers
from torchao_blockwise.ops.padding import ROW_BYTES
from torchao_blockwise.ops.quantization.kernels_amax import amaxes_of_each
from torchao_blockwise.ops.quantization.kernels_chunks import ANY, block_words, load_key, write_columnwise

_BLOCK = tl.constexpr(16)
_BITS = tl.constexpr(8)
# (tile rows, tile columns, warps, warps if rows of K elements do not start at multiples of 16 bytes), as in
# kernels_triton.py; (rows, columns, warps) of rowwise blocks that are rounded stochastically. Threads read 16 bytes at
# a time, so two threads share a block, and both compute its scale.
_NVFP4_TILE = (32, 128, 2, 4)
_ROWWISE_TILE = (32, 128, 4)


@triton.jit
def _pack(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of 4 bits two in a byte along columns, the even one low: [ROWS, COLUMNS] -> [ROWS, COLUMNS/2]."""
    even, odd = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))
    return even | (odd << 4)


@triton.jit
def _quantize_nvfp4_kernel(
    x_ptr,  # [B, M, K] bf16 | f16 | f32
    tensor_amax_ptr,  # f32 scalar; PER_GROUP [M] where tokens lie in groups, else [B]
    q_ptr,  # [B, M, ⌈K/2⌉] two codes a byte
    s_ptr,  # [B, M, K/BLOCK] e4m3 bytes, or [B, M/BLOCK, K/BLOCK] where SQUARE
    qt_ptr,  # where SQUARE [B, K, width_qt] two codes a byte; other columnwise copies are made of chunks
    st_ptr,  # [B, K/BLOCK, M/BLOCK] e4m3 bytes
    blocks_ptr,  # as above
    M,
    K,
    packed_k,  # ⌈K/2⌉: as an argument its divisibility is known, and with it how wide a store may be
    width_qt,  # bytes of a row of qt, M and padding, or None
    stride_xb,
    stride_xm,
    stride_xk,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    BATCHED: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_GROUP: tl.constexpr,
):
    BLOCKS_M: tl.constexpr = TILE_M // BLOCK
    BLOCKS_K: tl.constexpr = TILE_K // BLOCK
    batch, tile_m, tile_k, _, _ = locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, BATCHED)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_k = tile_k * TILE_K + tl.arange(0, TILE_K)
    # Of packed pairs and of blocks.
    pairs_m = tile_m * (TILE_M // 2) + tl.arange(0, TILE_M // 2)
    pairs_k = tile_k * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
    blocks_m = tile_m * BLOCKS_M + tl.arange(0, BLOCKS_M)
    blocks_k = tile_k * BLOCKS_K + tl.arange(0, BLOCKS_K)
    grid_m, grid_k = tl.cdiv(M, BLOCK), tl.cdiv(K, BLOCK)

    end_x = M
    if blocks_ptr is not None:
        _, end_x, _ = load_block(blocks_ptr, -1)

    if not PER_GROUP:
        tensor_amax = tl.load(tensor_amax_ptr)
    elif blocks_ptr is None:
        tensor_amax = tl.load(tensor_amax_ptr + batch)
    else:
        tensor_amax = tl.load(tensor_amax_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    x = load_tile(x_ptr, offs_m, offs_k, end_x, K, stride_xm, stride_xk, batch, stride_xb)
    magnitude = magnitude_bits(x)  # [TILE_M, TILE_K]

    if SQUARE:
        amax = tl.max(tl.max(magnitude.reshape(BLOCKS_M, BLOCK, BLOCKS_K, BLOCK), 3), 1)
        encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)  # [BLOCKS_M, BLOCKS_K]
        y = x.reshape(BLOCKS_M, BLOCK, BLOCKS_K, BLOCK) * encode[:, None, :, None]
        codes = encode_e2m1(y, ELEMENT_MAX)
        if ROWWISE:
            store_tile(q_ptr, _pack(codes, TILE_M, TILE_K), offs_m, pairs_k, M, packed_k, batch)
            store_tile(s_ptr, scale, blocks_m, blocks_k, grid_m, grid_k, batch)
        if COLUMNWISE:
            even, odd = tl.split(codes.reshape(TILE_M // 2, 2, TILE_K).permute(0, 2, 1))
            store_tile(qt_ptr, tl.trans(even | (odd << 4)), offs_k, pairs_m, K, width_qt, batch)
            store_tile(st_ptr, tl.trans(scale), blocks_k, blocks_m, grid_k, width_qt // (BLOCK // 2), batch)
    else:
        amax = tl.max(magnitude.reshape(TILE_M, BLOCKS_K, BLOCK), 2)
        y = x.reshape(TILE_M, BLOCKS_K, BLOCK)
        encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)  # [TILE_M, BLOCKS_K]
        codes = encode_e2m1(y * encode[:, :, None], ELEMENT_MAX)
        store_tile(q_ptr, _pack(codes, TILE_M, TILE_K), offs_m, pairs_k, M, packed_k, batch)
        store_tile(s_ptr, scale, offs_m, blocks_k, M, grid_k, batch)


@triton.jit(do_not_specialize=ANY)
def _rowwise_kernel(
    x_ptr,  # [M, K]
    amax_ptr,  # f32 scalar; PER_GROUP [M]
    q_ptr,  # [M, ⌈K/2⌉] two codes a byte
    s_ptr,  # [M, K/16] e4m3 bytes
    blocks_ptr,  # as above
    ends_ptr,
    key_ptr,
    M,
    K,
    packed_k,  # ⌈K/2⌉
    groups,
    stride_xm,
    stride_xk,
    row,
    column,
    grid,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    E_PAD: tl.constexpr,
    PER_GROUP: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // _BLOCK
    tiles_k = tl.cdiv(K, COLUMNS)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    offs_m = tile_m * ROWS + tl.arange(0, ROWS)
    offs_k = tile_k * COLUMNS + tl.arange(0, COLUMNS)
    offs_b = tile_k * BLOCKS + tl.arange(0, BLOCKS)
    blocks_k = tl.cdiv(K, _BLOCK)
    live = M
    if blocks_ptr is not None:
        _, live, _ = load_block(blocks_ptr, -1)
    x = load_tile(x_ptr, offs_m, offs_k, live, K, stride_xm, stride_xk).reshape(ROWS, BLOCKS, _BLOCK)
    amax = tl.max(magnitude_bits(x), 2)
    if PER_GROUP:
        tensor_amax = tl.load(amax_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    else:
        tensor_amax = tl.load(amax_ptr)
    encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)

    seed, stream, use, expert = load_key(key_ptr, OPERAND)
    rows, high = offs_m + row, offs_m * 0
    if ends_ptr is not None:
        group, start = groups_of(offs_m, ends_ptr, M, groups, E_PAD)
        rows, high = offs_m - start + row, group + expert
    wide = tl.where(grid < 0, blocks_k, grid)
    block = rows.to(tl.int64)[:, None] * wide + (column + offs_b)[None, :]
    w0, w1, w2, w3 = block_words(block | (high.to(tl.int64) << 32)[:, None], seed, stream, use)
    i = tl.arange(0, _BLOCK)[None, None, :]
    low = tl.where(i < 4, w0[:, :, None], w1[:, :, None])
    upper = tl.where(i < 12, w2[:, :, None], w3[:, :, None])
    random = (tl.where(i < 8, low, upper) >> ((i % 4) * _BITS).to(tl.uint32)) & 0xFF

    codes = encode_e2m1_stochastically(x * encode[:, :, None], random.to(tl.int32), ELEMENT_MAX)
    pairs_k = tile_k * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    store_tile(q_ptr, _pack(codes, ROWS, COLUMNS), offs_m, pairs_k, M, packed_k)
    store_tile(s_ptr, scale, offs_m, offs_b, M, blocks_k)


def write_nvfp4(
    x: torch.Tensor,
    amax: torch.Tensor,
    copies: Copies,
    options: CastOptions,
    groups: Groups | None,
    blocks: torch.Tensor | None,
    key: torch.Tensor | None,
    place: Place,
) -> None:
    """Write these copies of `x` [.., M, K], the columnwise one padded. blocks: the table of groups, or None."""
    rowwise, columnwise = copies
    if not options.fmt.is_square:
        if columnwise:
            write_columnwise(x, amax, columnwise, options, groups, blocks, key, place)
        if rowwise:
            if amax.dim() and groups is not None:
                amax = amaxes_of_each(amax, groups.ends, None, x.shape[0], x.shape[0])
            if key is None:
                _write_tiles(x, amax, copies._replace(columnwise=None), blocks)
            else:
                _write_rounded(x, amax, rowwise, groups, blocks, key, place)
    elif rowwise and columnwise and x.shape[-1] % ROW_BYTES:
        # A program with two sets of addresses spills.
        _write_tiles(x, amax, copies._replace(columnwise=None), blocks)
        _write_tiles(x, amax, copies._replace(rowwise=None), blocks)
    else:
        _write_tiles(x, amax, copies, blocks)


def _write_tiles(x: torch.Tensor, amax: torch.Tensor, copies: Copies, blocks: torch.Tensor | None) -> None:
    fmt, (*_, M, K) = (copies.rowwise or copies.columnwise).format, x.shape
    x, B, strides = matrices_of(x)
    tile_m, tile_k, *warps = _NVFP4_TILE
    width_qt = copies.columnwise.qdata.shape[-1] if copies.columnwise else None
    launch(
        _quantize_nvfp4_kernel, B * ceil_div(M, tile_m) * ceil_div(K, tile_k),
        x, amax, *pointers(copies), blocks, M, K, fmt.element.packed(K), width_qt, *strides,
        ELEMENT_MAX=fmt.element.max, SCALE_MAX=fmt.scale_max, BATCHED=B > 1, SQUARE=fmt.is_square,
        ROWWISE=copies.rowwise is not None, COLUMNWISE=copies.columnwise is not None, TILE_M=tile_m, TILE_K=tile_k,
        BLOCK=fmt.block[1], PER_GROUP=amax.dim() > 0, num_warps=warps[K % ROW_BYTES != 0],
    )  # fmt: skip


def _write_rounded(
    x: torch.Tensor,
    amax: torch.Tensor,
    copy: Operand,
    groups: Groups | None,
    blocks: torch.Tensor | None,
    key: torch.Tensor,
    place: Place,
) -> None:
    fmt, (M, K) = copy.format, x.shape
    operand, *where = place
    ends, count = (None, 1) if groups is None else (groups.ends, groups.ends.shape[0])
    rows, columns, warps = _ROWWISE_TILE
    launch(
        _rowwise_kernel, ceil_div(M, rows) * ceil_div(K, columns),
        x, amax, copy.qdata, (copy.scale, torch.uint8), blocks, ends, key,
        M, K, copy.qdata.shape[1], count, *x.stride(), *where,
        OPERAND=operand, ROWS=rows, COLUMNS=columns, ELEMENT_MAX=fmt.element.max, SCALE_MAX=fmt.scale_max,
        E_PAD=triton.next_power_of_2(count), PER_GROUP=amax.dim() > 0, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
