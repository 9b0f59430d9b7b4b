"""Transformed and stochastically rounded NVFP4 copies in Triton: a launch for both amaxes, and one for each copy.

Columnwise copies are those of ops/quantization/kernels_chunks.py. Rowwise blocks lie along the rows, which threads read
16 bytes at a time: a block is two threads', and both compute what is the block's.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import NVFP4_1X16, CastOptions, Copies, Groups, Operand, Place
from torchao_blockwise.ops.device.elements import encode_e2m1_stochastically, magnitude_bits
from torchao_blockwise.ops.device.group_blocks import load_block
from torchao_blockwise.ops.device.groups import groups_of
from torchao_blockwise.ops.device.random_bits import block_words, load_key
from torchao_blockwise.ops.device.scales import nvfp4_scales
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import as_asked, new_copies
from torchao_blockwise.ops.quantization.kernels_amax import amaxes_of_each
from torchao_blockwise.ops.quantization.kernels_chunks import (
    ANY,
    columnwise_copy,
    largest_of,
    load_chunks,
    locate_chunks,
    transform,
)
from torchao_blockwise.ops.quantization.kernels_triton import _load_tile, _pack, _store_tile
from torchao_blockwise.ops.quantization.kernels_triton import quantize as nearest

_BLOCK = tl.constexpr(16)
_BITS = tl.constexpr(8)
# (chunks, columns, warps) of a tile of both amaxes, and how many programs; (rows, columns, warps) of rowwise blocks.
_AMAX_TILE, _AMAX_PROGRAMS = (4, 128, 4), 528
_ROWWISE_TILE = (32, 128, 4)


@triton.jit(do_not_specialize=["M", "chunks", "groups"])
def _amaxes_kernel(
    x_ptr,  # [M, K]
    plain_ptr,  # int32, bits of an fp32, zero before; PER_GROUP [groups]
    transformed_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table
    ends_ptr,  # int32 [groups], PER_GROUP; else None
    M,
    K,
    chunks,  # of all tokens, each group padded to whole ones
    groups,
    stride_xm,
    stride_xk,
    HADAMARD: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    E_PAD: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLUMNS)
    plain = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    transformed = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(chunks, CHUNKS) * tiles_k, tl.num_programs(0)):
        offs_c = (tile // tiles_k) * CHUNKS + tl.arange(0, CHUNKS)
        offs_k = (tile % tiles_k) * COLUMNS + tl.arange(0, COLUMNS)
        # The entry of a chunk behind the last one may not be there.
        firsts, ends = locate_chunks(blocks_ptr, tl.minimum(offs_c, chunks - 1), M)
        tiles = load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk)
        if PER_GROUP:
            # A chunk lies in one group; those behind the last one have no tokens.
            group, _ = groups_of(firsts, ends_ptr, M, groups, E_PAD)
            lies_in_one = (firsts < ends) & (group < groups)
            tl.atomic_max(plain_ptr + group, tl.max(largest_of(tiles), 1), mask=lies_in_one)
            mixed = transform(tiles, x_ptr.dtype.element_ty, HADAMARD)
            tl.atomic_max(transformed_ptr + group, tl.max(largest_of(mixed), 1), mask=lies_in_one)
        else:
            plain = tl.maximum(plain, largest_of(tiles))
            transformed = tl.maximum(transformed, largest_of(transform(tiles, x_ptr.dtype.element_ty, HADAMARD)))
    if not PER_GROUP:
        tl.atomic_max(plain_ptr, tl.max(tl.max(plain, 1), 0))
        tl.atomic_max(transformed_ptr, tl.max(tl.max(transformed, 1), 0))


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
    x = _load_tile(x_ptr, 0, offs_m, offs_k, live, K, 0, stride_xm, stride_xk).reshape(ROWS, BLOCKS, _BLOCK)
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
    _store_tile(q_ptr, 0, _pack(codes, ROWS, COLUMNS), offs_m, pairs_k, M, packed_k)
    _store_tile(s_ptr, 0, scale, offs_m, offs_b, M, blocks_k)


def amaxes(x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in the op."""
    ends = groups.ends if per_group and groups is not None else None
    shape, experts = ((), 1) if ends is None else (ends.shape, ends.shape[0])
    # Each in memory of its own: compilers hold results of operations to the alignment that an allocation has.
    plain, transformed = (torch.zeros(shape, dtype=torch.int32, device=x.device) for _ in range(2))
    M, K = x.shape
    if x.numel() > 0:
        chunks, columns, warps = _AMAX_TILE
        blocks = None if groups is None else block_table(groups, M, NVFP4_1X16)
        # The first entry of the table is of all tokens.
        count = ceil_div(M, NVFP4_1X16.block[1]) if blocks is None else blocks.shape[0] - 1
        grid = min(ceil_div(count, chunks) * ceil_div(K, columns), _AMAX_PROGRAMS)
        launch(
            _amaxes_kernel, grid, x, plain, transformed, blocks, ends, M, K, count, experts, *x.stride(),
            HADAMARD=hadamard, CHUNKS=chunks, COLUMNS=columns, PER_GROUP=ends is not None,
            E_PAD=triton.next_power_of_2(experts), num_warps=warps,
        )  # fmt: skip
    return plain, transformed


def quantize(
    x: torch.Tensor,
    amax_bits: torch.Tensor | None,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
) -> Copies:
    """Arguments and result as in the op."""
    if key is None and not options.hadamard:
        return nearest(x, amax_bits, options, groups)
    assert amax_bits is not None
    padded = options.padded or groups is not None
    copies = new_copies(x, x.shape, options if padded else options._replace(padded=True), groups)
    if x.numel() > 0:
        amax = amax_bits.view(torch.float32)
        if options.rowwise:
            _rowwise_copy(x, amax, copies.rowwise, options, groups, key, place)
        else:
            blocks = None if groups is None else block_table(groups, x.shape[0], options.fmt)
            ends = None if groups is None or (key is None and not amax.dim()) else groups.ends
            columnwise_copy(x, amax, copies.columnwise, options, blocks, key, ends, place)
    return copies if padded else as_asked(copies, x.shape[0], options)


def _rowwise_copy(
    x: torch.Tensor,
    amax: torch.Tensor,
    copy: Operand,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor,
    place: Place,
) -> None:
    fmt, (M, K) = copy.format, x.shape
    operand, *where = place
    blocks, ends, count = None, None, 1
    if groups is not None:
        blocks, ends, count = block_table(groups, M, fmt), groups.ends, groups.ends.shape[0]
    per_group = amax.dim() > 0
    if per_group and ends is not None:
        amax = amaxes_of_each(amax, ends, None, M, M)
    rows, columns, warps = _ROWWISE_TILE
    launch(
        _rowwise_kernel, ceil_div(M, rows) * ceil_div(K, columns),
        x, amax, copy.qdata, (copy.scale, torch.uint8), blocks, ends, key,
        M, K, copy.qdata.shape[1], count, *x.stride(), *where,
        OPERAND=operand, ROWS=rows, COLUMNS=columns, ELEMENT_MAX=fmt.element.max, SCALE_MAX=fmt.scale_max,
        E_PAD=triton.next_power_of_2(count), PER_GROUP=per_group, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
