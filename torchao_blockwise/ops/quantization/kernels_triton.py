"""Blockwise quantization in Triton: a read of `x` writes a copy, or both copies where blocks are square.

A program takes one tile of a matrix, and every block that touches it lies in it whole:

            K                     rowwise                    columnwise
      ┌───┬───┬───┐               q  [M, K]   tile as it is   qᵀ [K, M]   tile transposed through shared memory
    M │   │ x │   │  one tile →   1×B blocks: max along K     1×B blocks: max along M
      └───┴───┴───┘               B×B blocks: one max over the block, both copies share the payload

FP8: a tile is as long as a block (128) along the dims that blocks run along. Both copies of one-row blocks take a
launch each: a tile held in registers, with two sets of scaled values, would spill.
NVFP4: a tile holds many blocks of 16, seen by a reshape; two codes are packed in a byte along each copy's last dim.
Columnwise copies of one-row blocks have a kernel of their own (kernels_chunks.py).

Columnwise payload is stored 16 bytes at a time whatever M is: its rows are padded to whole runs
(ops/padding.py) with the zeros that a tile holds beside its matrix.

Tiles are numbered along grid x alone, whose limit is 2^31 (y and z end at 65535). `M` is specialized on divisibility by
16, which reads of 16 bytes along M need (of a transposed `x`); so token counts that change make two builds of a kernel
(three with M = 1), never one a count.

Tokens in groups (ops/groups): a table says where the rows of a block lie and which of them count; what follows the last
group is zeros. Of the copy that is padded M is the padded size; its blocks read from any row on, as a group starts
anywhere, and still write on multiples of 16.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, NVFP4_1X16, CastOptions, Copies, Groups
from torchao_blockwise.ops.device.elements import encode_e2m1, encode_e4m3, largest_magnitude, magnitude_bits, to_f32
from torchao_blockwise.ops.device.group_blocks import load_block
from torchao_blockwise.ops.device.scales import fp8_scales, fp8_vector_scales, nvfp4_scales
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import as_asked, new_copies, pointers
from torchao_blockwise.ops.quantization.kernels_amax import amaxes_of_each
from torchao_blockwise.ops.quantization.kernels_chunks import columnwise_copy

# (tile rows, tile columns, warps, warps where rows of K elements do not start on 16 bytes), measured on an H200 by
# benchmarks/tune_quantize.py, as it was at commit d352a7a. One-row blocks along K leave the tile's height free, those
# along M its width. What counts is how many warps a multiprocessor has room for and, where a reduction along M crosses
# warps, how many rows each sees. Rows off 16 bytes are moved an element at a time, each at an address of its own: more
# threads for enough registers.
_FP8_ROWWISE_TILE = (32, 128, 4, 16)
_FP8_COLUMNWISE_TILE = (128, 64, 4, 8)
_FP8_SQUARE_TILE = (128, 128, 4, 16)
_NVFP4_TILE = (32, 128, 2, 4)

_ALIGNMENT = 16


@triton.jit
def _locate_tile(tile, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BATCHED: tl.constexpr):
    """(matrix, tile row, tile column, rows of tiles, columns of tiles) of a tile; columns run fastest."""
    tiles_m, tiles_k = tl.cdiv(M, TILE_M), tl.cdiv(K, TILE_K)
    batch, tile_m = tl.full([], 0, tl.int64), tile // tiles_k
    if BATCHED:
        # A division takes 20 instructions, as many as two or three values do altogether.
        batch, tile_m = (tile_m // tiles_m).to(tl.int64), tile_m % tiles_m
    return batch, tile_m, tile % tiles_k, tiles_m, tiles_k


@triton.jit
def _load_values(x_ptr, batch, offs_m, offs_k, M, K, stride_xb, stride_xm, stride_xk):
    """A tile of `x` in its dtype, zero outside."""
    offsets = offs_m.to(tl.int64)[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    return tl.load(x_ptr + batch * stride_xb + offsets, mask=mask, other=0.0)


@triton.jit
def _load_tile(x_ptr, batch, offs_m, offs_k, M, K, stride_xb, stride_xm, stride_xk):
    """A tile of `x` in fp32, zero outside."""
    return to_f32(_load_values(x_ptr, batch, offs_m, offs_k, M, K, stride_xb, stride_xm, stride_xk))


@triton.jit
def _store_tile(ptr, batch, values, offs_row, offs_column, rows, columns):
    """Store `values` into a contiguous [.., rows, columns]."""
    offsets = offs_row.to(tl.int64)[:, None] * columns + offs_column[None, :]
    mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
    tl.store(ptr + batch * rows * columns + offsets, values, mask=mask)


@triton.jit
def _quantize_rows(
    x_ptr, q_ptr, s_ptr, batch, first, end_x, offs_k, M, K, stride_xb, stride_xm, stride_xk,
    ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks that are rows: ROWS of them from row `first` on, at columns `offs_k`, zeros from row `end_x` on.

    s_ptr: [M], of these columns.
    """
    offs_m = first + tl.arange(0, ROWS)
    x = _load_values(x_ptr, batch, offs_m, offs_k, end_x, K, stride_xb, stride_xm, stride_xk)
    encode, scale = fp8_vector_scales(largest_magnitude(x, 1), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    _store_tile(q_ptr, batch, encode_e4m3(to_f32(x) * encode[:, None], ELEMENT_MAX), offs_m, offs_k, M, K)
    tl.store(s_ptr + offs_m, scale, mask=offs_m < M)


@triton.jit
def _quantize_columns(
    x_ptr, qt_ptr, st_ptr, batch, offs_x, end_x, offs_m, first, width_qt, K, stride_xb, stride_xm, stride_xk,
    ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks that are columns: COLUMNS of them from column `first` on, at rows `offs_m`.

    They are rows `offs_x` of `x`, zeros from row `end_x` on. st_ptr: [K], of these rows.
    """
    offs_k = first + tl.arange(0, COLUMNS)
    x = _load_values(x_ptr, batch, offs_x, offs_k, end_x, K, stride_xb, stride_xm, stride_xk)
    encode, scale = fp8_vector_scales(largest_magnitude(x, 0), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    qt = tl.trans(encode_e4m3(to_f32(x) * encode[None, :], ELEMENT_MAX))
    _store_tile(qt_ptr, batch, qt, offs_k, offs_m, K, width_qt)
    tl.store(st_ptr + offs_k, scale, mask=offs_k < K)


@triton.jit
def _quantize_fp8_kernel(
    x_ptr,  # [B, M, K] bf16 | f16 | f32
    q_ptr,  # [B, M, K] e4m3 bytes
    s_ptr,  # [B, K/BLOCK, M] f32, or [B, M/BLOCK, K/BLOCK] where SQUARE
    qt_ptr,  # [B, K, width_qt] e4m3 bytes
    st_ptr,  # [B, M/BLOCK, K] f32, or [B, K/BLOCK, M/BLOCK] where SQUARE
    blocks_ptr,  # where tokens lie in groups their table, see device/group_blocks.py; not SQUARE then, and B = 1
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
    batch, tile_m, tile_k, tiles_m, tiles_k = _locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, BATCHED)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_k = tile_k * TILE_K + tl.arange(0, TILE_K)
    # The tile's rows in `x`, of which those from `end_x` on are zeros.
    offs_x, end_x = offs_m, M
    if blocks_ptr is not None:
        first_x, end_x, _ = load_block(blocks_ptr, tile_m if COLUMNWISE else -1)
        if COLUMNWISE:
            offs_x = first_x + tl.arange(0, TILE_M)

    if SQUARE:
        x = _load_values(x_ptr, batch, offs_m, offs_k, M, K, stride_xb, stride_xm, stride_xk)
        encode, scale = fp8_scales(tl.max(largest_magnitude(x, 1), 0), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
        q = encode_e4m3(to_f32(x) * encode, ELEMENT_MAX)
        if ROWWISE:
            _store_tile(q_ptr, batch, q, offs_m, offs_k, M, K)
            tl.store(s_ptr + (batch * tiles_m + tile_m) * tiles_k + tile_k, scale)
        if COLUMNWISE:
            _store_tile(qt_ptr, batch, tl.trans(q), offs_k, offs_m, K, width_qt)
            tl.store(st_ptr + (batch * tiles_k + tile_k) * tiles_m + tile_m, scale)
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


@triton.jit
def _pack(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of 4 bits two in a byte along columns, the even one low: [ROWS, COLUMNS] -> [ROWS, COLUMNS/2]."""
    even, odd = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))
    return even | (odd << 4)


@triton.jit
def _pack_transposed(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of 4 bits two in a byte along rows, then transposed: [ROWS, COLUMNS] -> [COLUMNS, ROWS/2]."""
    even, odd = tl.split(codes.reshape(ROWS // 2, 2, COLUMNS).permute(0, 2, 1))
    return tl.trans(even | (odd << 4))


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
    batch, tile_m, tile_k, _, _ = _locate_tile(tl.program_id(0), M, K, TILE_M, TILE_K, BATCHED)
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
    x = _load_tile(x_ptr, batch, offs_m, offs_k, end_x, K, stride_xb, stride_xm, stride_xk)
    magnitude = magnitude_bits(x)  # [TILE_M, TILE_K]

    if SQUARE:
        amax = tl.max(tl.max(magnitude.reshape(BLOCKS_M, BLOCK, BLOCKS_K, BLOCK), 3), 1)
        encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)  # [BLOCKS_M, BLOCKS_K]
        y = x.reshape(BLOCKS_M, BLOCK, BLOCKS_K, BLOCK) * encode[:, None, :, None]
        codes = encode_e2m1(y, ELEMENT_MAX)
        if ROWWISE:
            _store_tile(q_ptr, batch, _pack(codes, TILE_M, TILE_K), offs_m, pairs_k, M, packed_k)
            _store_tile(s_ptr, batch, scale, blocks_m, blocks_k, grid_m, grid_k)
        if COLUMNWISE:
            _store_tile(qt_ptr, batch, _pack_transposed(codes, TILE_M, TILE_K), offs_k, pairs_m, K, width_qt)
            _store_tile(st_ptr, batch, tl.trans(scale), blocks_k, blocks_m, grid_k, width_qt // (BLOCK // 2))
    else:
        amax = tl.max(magnitude.reshape(TILE_M, BLOCKS_K, BLOCK), 2)
        y = x.reshape(TILE_M, BLOCKS_K, BLOCK)
        encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)  # [TILE_M, BLOCKS_K]
        codes = encode_e2m1(y * encode[:, :, None], ELEMENT_MAX)
        _store_tile(q_ptr, batch, _pack(codes, TILE_M, TILE_K), offs_m, pairs_k, M, packed_k)
        _store_tile(s_ptr, batch, scale, offs_m, blocks_k, M, grid_k)


def quantize(
    x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, groups: Groups | None = None
) -> Copies:
    """Arguments and result as in the op, or in that of tokens in groups, bit for bit."""
    fmt, K = options.fmt, x.shape[-1]
    padded = options.padded or groups is not None or not options.columnwise
    copies = new_copies(x, x.shape, options if padded else options._replace(padded=True), groups)
    if x.numel() > 0:
        blocks = None if groups is None else block_table(groups, x.shape[0], fmt)
        rowwise, columnwise = copies
        if columnwise and fmt.name == NVFP4_1X16.name:
            assert amax_bits is not None
            ends = groups.ends if groups is not None and amax_bits.dim() else None
            columnwise_copy(x, amax_bits.view(torch.float32), columnwise, options, blocks, ends=ends)
            columnwise = None
        if rowwise and columnwise and (K % _ALIGNMENT or not fmt.is_square):
            # A program with two sets of values, or of addresses, spills or has few neighbors.
            _launch(x, amax_bits, Copies(rowwise, None), options, groups, blocks)
            _launch(x, amax_bits, Copies(None, columnwise), options, groups, blocks)
        elif rowwise or columnwise:
            _launch(x, amax_bits, Copies(rowwise, columnwise), options, groups, blocks)
    return copies if padded else as_asked(copies, x.shape[-2], options)


def _launch(
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    copies: Copies,
    options: CastOptions,
    groups: Groups | None,
    blocks: torch.Tensor | None,
) -> None:
    """Write these copies in one launch. blocks: of tokens in groups, their table of blocks."""
    fmt, (*batch, M, K) = options.fmt, x.shape
    rowwise, columnwise = copies.rowwise is not None, copies.columnwise is not None
    width_qt = copies.columnwise.qdata.shape[-1] if columnwise else None
    if columnwise and blocks is not None:
        M = width_qt * fmt.element.per_byte
    x = x.flatten(0, -3) if batch else x
    B, strides = (x.shape[0], x.stride()) if batch else (1, (0, *x.stride()))
    tile_m, tile_k, constants = _build(options, rowwise, columnwise, K % _ALIGNMENT != 0)
    grid = B * ceil_div(M, tile_m) * ceil_div(K, tile_k)
    constants = {"BATCHED": B > 1, **constants}
    tensors = pointers(copies)
    if fmt.element is E2M1:
        # Of tokens in groups the kernel knows it itself: one build less.
        sizes = M, K, fmt.element.packed(K), width_qt if blocks is None else None
        amax = amax_bits.view(torch.float32)
        constants["PER_GROUP"] = amax.dim() > 0
        if amax.dim() and groups is not None:
            amax = amaxes_of_each(amax, groups.ends, None, M, M)
        launch(_quantize_nvfp4_kernel, grid, x, amax, *tensors, blocks, *sizes, *strides, **constants)
    else:
        launch(_quantize_fp8_kernel, grid, x, *tensors, blocks, M, K, width_qt, *strides, **constants)


def _build(cast: CastOptions, rowwise: bool, columnwise: bool, ragged: bool):
    """(tile rows, tile columns, options)."""
    fmt = cast.fmt
    if fmt.element is E2M1:
        tile_m, tile_k, *warps = _NVFP4_TILE
        options = {"SCALE_MAX": fmt.scale_max, "BLOCK": fmt.block[1]}
    else:
        one_row = _FP8_COLUMNWISE_TILE if columnwise else _FP8_ROWWISE_TILE
        tile_m, tile_k, *warps = _FP8_SQUARE_TILE if fmt.is_square else one_row
        options = {"MIN_AMAX": fmt.min_amax, "POWER_OF_2": cast.power_of_2_scales}
    options |= {"SQUARE": fmt.is_square, "ROWWISE": rowwise, "COLUMNWISE": columnwise}
    options |= {"TILE_M": tile_m, "TILE_K": tile_k, "ELEMENT_MAX": fmt.element.max, "num_warps": warps[ragged]}
    return tile_m, tile_k, options
