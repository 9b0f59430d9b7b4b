"""Transformed and stochastically rounded NVFP4 copies in Triton: a launch for both amaxes, and one for each copy.

    x  [M, K] ── 16 tokens as 16 tiles [chunks, columns] ──▶ butterflies ──▶ amax, codes of a block in one thread

A columnwise block is a chunk of 16 tokens of one column. Its tokens are 16 values of one thread: the transform, the
amax and the packing of a block need no exchange, its scale and its random bits are computed once, and its codes are the
8 bytes that are stored. Rowwise blocks lie along the rows, which threads read 16 bytes at a time: a block is two
threads', and both compute what is the block's.
"""

# ruff: noqa: RUF005  # Triton knows no unpacking.

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import NVFP4_1X16, CastOptions, Copies, Groups, Place
from torchao_blockwise.ops.device.elements import (
    encode_e2m1,
    encode_e2m1_stochastically,
    magnitude_bits,
    round_both,
    to_f32,
)
from torchao_blockwise.ops.device.group_blocks import load_block
from torchao_blockwise.ops.device.groups import load_ends
from torchao_blockwise.ops.device.random_bits import block_words, load_key
from torchao_blockwise.ops.device.scales import nvfp4_scales
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import as_asked, new_copies
from torchao_blockwise.ops.quantization.kernels_triton import _load_tile, _pack, _store_tile
from torchao_blockwise.ops.quantization.kernels_triton import quantize as nearest

_BLOCK = tl.constexpr(16)
_BITS = tl.constexpr(8)
# (chunks, columns, warps) of a tile of columnwise blocks, and (rows, columns, warps) of rowwise ones.
_COLUMNWISE_TILE = (8, 64, 4)
_ROWWISE_TILE = (32, 128, 4)
_AMAX_TILE = (4, 128, 4)
_AMAX_PROGRAMS = 2048
# Counts for masks and numbers of blocks: their divisibility says nothing of memory.
_ANY = ("M", "groups", "row", "column", "grid", "expert")


@triton.jit
def _load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk):
    """Tokens firsts + i of columns `offs_k` in fp32, i from 0 to 15: tiles [chunks, columns]; zero from `ends` on."""
    tiles = ()
    for i in tl.static_range(_BLOCK):
        rows = firsts + i
        offsets = rows.to(tl.int64)[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk
        mask = (rows < ends)[:, None] & (offs_k < K)[None, :]
        tiles = tiles + (to_f32(tl.load(x_ptr + offsets, mask=mask, other=0.0)),)
    return tiles


@triton.jit
def _butterflies(values, STRIDE: tl.constexpr):
    mixed = ()
    for i in tl.static_range(_BLOCK):
        if (i // STRIDE) % 2 == 1:
            mixed = mixed + (values[i - STRIDE] - values[i],)
        else:
            mixed = mixed + (values[i] + values[i + STRIDE],)
    return mixed


@triton.jit
def _transform(tiles, dtype: tl.constexpr, HADAMARD: tl.constexpr):
    """Row vectors of 16 values times T, in fp32, rounded to `dtype`; see formats/hadamard.py."""
    values = ()
    for i in tl.static_range(_BLOCK):
        if (HADAMARD >> i) & 1:
            values = values + (-tiles[i],)
        else:
            values = values + (tiles[i],)
    values = _butterflies(_butterflies(_butterflies(_butterflies(values, 1), 2), 4), 8)
    rounded = ()
    for i in tl.static_range(_BLOCK // 2):
        first, second = round_both(values[2 * i] * 0.25, values[2 * i + 1] * 0.25, dtype)
        rounded = rounded + (first, second)
    return rounded


@triton.jit
def _largest(tiles):
    """`magnitude_bits` of the largest of 16 values; NaN propagates."""
    largest = magnitude_bits(tiles[0])
    for i in tl.static_range(1, _BLOCK):
        largest = tl.maximum(largest, magnitude_bits(tiles[i]))
    return largest


@triton.jit
def _groups_of(rows, ends_ptr, tokens, groups, E_PAD: tl.constexpr):
    """(group, its first token) of rows that lie in groups."""
    index, ends, _ = load_ends(ends_ptr, tokens, groups, E_PAD)
    earlier = (ends[None, :] <= rows[:, None]) & (index < groups)[None, :]
    return tl.sum(earlier.to(tl.int32), 1), tl.max(tl.where(earlier, ends[None, :], 0), 1)


@triton.jit
def _locate_chunks(blocks_ptr, chunks, M):
    """(first token, end of the tokens that count) of each chunk of 16."""
    if blocks_ptr is None:
        return chunks * _BLOCK, chunks * 0 + M
    else:
        firsts, ends, _ = load_block(blocks_ptr, chunks)
        return firsts, ends


@triton.jit(do_not_specialize=["M", "chunks"])
def _amaxes_kernel(
    x_ptr,  # [M, K]
    plain_ptr,  # int32, bits of an fp32, zero before
    transformed_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table
    M,
    K,
    chunks,  # of all tokens, each group padded to whole ones
    stride_xm,
    stride_xk,
    HADAMARD: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLUMNS)
    plain = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    transformed = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(chunks, CHUNKS) * tiles_k, tl.num_programs(0)):
        offs_c = (tile // tiles_k) * CHUNKS + tl.arange(0, CHUNKS)
        offs_k = (tile % tiles_k) * COLUMNS + tl.arange(0, COLUMNS)
        # The entry of a chunk behind the last one may not be there.
        firsts, ends = _locate_chunks(blocks_ptr, tl.minimum(offs_c, chunks - 1), M)
        tiles = _load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk)
        plain = tl.maximum(plain, _largest(tiles))
        transformed = tl.maximum(transformed, _largest(_transform(tiles, x_ptr.dtype.element_ty, HADAMARD)))
    tl.atomic_max(plain_ptr, tl.max(tl.max(plain, 1), 0))
    tl.atomic_max(transformed_ptr, tl.max(tl.max(transformed, 1), 0))


@triton.jit(do_not_specialize=_ANY)
def _columnwise_kernel(
    x_ptr,  # [M, K]
    amax_ptr,  # f32 scalar
    qt_ptr,  # int64 [K, chunks], 16 codes each
    st_ptr,  # [K, chunks] e4m3 bytes
    blocks_ptr,  # None, or where tokens lie in groups their table
    ends_ptr,  # None, or int32 [groups]
    key_ptr,  # int64 [3], or None for round to nearest
    M,
    K,
    runs,  # of the copy: pairs of chunks, so that it is known that rows are multiples of 16 bytes; of groups chunks
    groups,
    stride_xm,
    stride_xk,
    row,  # of the copy in the whole,
    column,  # in chunks,
    grid,  # and how many chunks a row of the whole has; -1: as many as there are tokens for
    expert,
    OPERAND: tl.constexpr,
    HADAMARD: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    E_PAD: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLUMNS)
    chunks = runs * 2 if blocks_ptr is None else runs
    offs_c = (tl.program_id(0) // tiles_k) * CHUNKS + tl.arange(0, CHUNKS)
    offs_k = (tl.program_id(0) % tiles_k) * COLUMNS + tl.arange(0, COLUMNS)
    firsts, ends = _locate_chunks(blocks_ptr, tl.minimum(offs_c, chunks - 1), M)
    tiles = _load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk)
    if HADAMARD:
        tiles = _transform(tiles, x_ptr.dtype.element_ty, HADAMARD)
    encode, scale = nvfp4_scales(_largest(tiles), tl.load(amax_ptr), ELEMENT_MAX, SCALE_MAX)  # [CHUNKS, COLUMNS]

    words = (encode, encode, encode, encode)
    if key_ptr is not None:
        seed, stream, use = load_key(key_ptr, OPERAND)
        if ends_ptr is None:
            first_chunk, high = offs_c * 0, offs_c * 0
            wide = tl.cdiv(M, _BLOCK) + offs_c * 0
        else:
            group, start = _groups_of(firsts, ends_ptr, M, groups, E_PAD)
            # In chunks of its group.
            first_chunk, high = offs_c - (firsts - start) // _BLOCK, group + expert
            wide = tl.cdiv(ends - start, _BLOCK)
        wide = tl.where(grid < 0, wide, grid)
        block = (offs_k + row).to(tl.int64)[None, :] * wide[:, None] + (column + offs_c - first_chunk)[:, None]
        words = block_words(block | (high.to(tl.int64) << 32)[:, None], seed, stream, use)

    packed = tl.zeros((CHUNKS, COLUMNS), tl.int64)
    for i in tl.static_range(_BLOCK):
        y = tiles[i] * encode
        if key_ptr is None:
            codes = encode_e2m1(y, ELEMENT_MAX)
        else:
            random = ((words[i // 4] >> (_BITS * (i % 4))) & 0xFF).to(tl.int32)
            codes = encode_e2m1_stochastically(y, random, ELEMENT_MAX)
        packed |= codes.to(tl.int64) << (4 * i)
    # Behind the last group a transform may have made -0 of zeros.
    packed = tl.where((firsts < ends)[:, None], packed, 0)
    _store_tile(qt_ptr, 0, tl.trans(packed), offs_k, offs_c, K, chunks)
    _store_tile(st_ptr, 0, tl.trans(scale), offs_k, offs_c, K, chunks)


@triton.jit(do_not_specialize=_ANY)
def _rowwise_kernel(
    x_ptr,  # [M, K]
    amax_ptr,  # f32 scalar
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
    expert,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    E_PAD: tl.constexpr,
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
    encode, scale = nvfp4_scales(tl.max(magnitude_bits(x), 2), tl.load(amax_ptr), ELEMENT_MAX, SCALE_MAX)

    seed, stream, use = load_key(key_ptr, OPERAND)
    rows, high = offs_m + row, offs_m * 0
    if ends_ptr is not None:
        group, start = _groups_of(offs_m, ends_ptr, M, groups, E_PAD)
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


def amaxes(x: torch.Tensor, hadamard: int, groups: Groups | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in the op."""
    bits = torch.zeros((2,), dtype=torch.int32, device=x.device)
    plain, transformed = bits.unbind()
    M, K = x.shape
    if x.numel() > 0:
        chunks, columns, warps = _AMAX_TILE
        blocks = None if groups is None else block_table(groups, M, NVFP4_1X16)
        # The first entry of the table is of all tokens.
        count = ceil_div(M, NVFP4_1X16.block[1]) if blocks is None else blocks.shape[0] - 1
        grid = min(ceil_div(count, chunks) * ceil_div(K, columns), _AMAX_PROGRAMS)
        launch(
            _amaxes_kernel, grid, x, plain, transformed, blocks, M, K, count, *x.stride(),
            HADAMARD=hadamard, CHUNKS=chunks, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return plain, transformed


def quantize(
    x: torch.Tensor,
    amax_bits: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
) -> Copies:
    """Arguments and result as in the op."""
    if options.rowwise and key is None:
        # Neither transformed nor rounded otherwise: the copy that all have.
        return nearest(x, amax_bits, options, groups)
    padded = options.padded or groups is not None
    copies = new_copies(x, x.shape, options if padded else options._replace(padded=True), groups)
    M, K = x.shape
    if x.numel() > 0:
        fmt, count = options.fmt, 1 if groups is None else groups.ends.shape[0]
        operand, *place = place
        blocks = None if groups is None else block_table(groups, M, fmt)
        tables = (blocks, None if groups is None or key is None else groups.ends, key)
        constants = {
            "OPERAND": operand,
            "ELEMENT_MAX": fmt.element.max,
            "SCALE_MAX": fmt.scale_max,
            "E_PAD": triton.next_power_of_2(count),
            # An operation that shows two roundings must not become one FMA with one.
            "enable_fp_fusion": False,
        }
        amax = amax_bits.view(torch.float32)
        if options.rowwise:
            q, s = copies.rowwise.qdata, copies.rowwise.scale
            rows, columns, warps = _ROWWISE_TILE
            launch(
                _rowwise_kernel, ceil_div(M, rows) * ceil_div(K, columns),
                x, amax, q, (s, torch.uint8), *tables, M, K, q.shape[1], count, *x.stride(), *place,
                ROWS=rows, COLUMNS=columns, num_warps=warps, **constants,
            )  # fmt: skip
        else:
            qt, st = copies.columnwise.qdata, copies.columnwise.scale
            chunks, columns, warps = _COLUMNWISE_TILE
            runs = st.shape[1] if blocks is not None else st.shape[1] // 2
            launch(
                _columnwise_kernel, ceil_div(st.shape[1], chunks) * ceil_div(K, columns),
                x, amax, (qt, torch.int64), (st, torch.uint8), *tables, M, K, runs, count, *x.stride(), *place,
                HADAMARD=options.hadamard, CHUNKS=chunks, COLUMNS=columns, num_warps=warps, **constants,
            )  # fmt: skip
    return copies if padded else as_asked(copies, M, options)
