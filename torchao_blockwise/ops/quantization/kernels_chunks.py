"""Columnwise NVFP4 copies in Triton: plain, of the random Hadamard transform, and rounded stochastically.

    x  [M, K] ── 16 tokens as 16 tiles [chunks, columns] ──▶ (butterflies) ──▶ amax, codes of a block in one thread

A columnwise block is a chunk of 16 tokens of one column. Its tokens are 16 values of one thread: the transform, the
amax and the packing of a block need no exchange, its scale and its random bits are computed once, and its codes are the
8 bytes that are stored.
"""

# ruff: noqa: RUF005  # Triton knows no unpacking.

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import CastOptions, Operand, Place
from torchao_blockwise.ops.device.elements import (
    encode_e2m1,
    encode_e2m1_stochastically,
    magnitude_bits,
    round_both,
    to_f32,
)
from torchao_blockwise.ops.device.group_blocks import load_block
from torchao_blockwise.ops.device.groups import groups_of
from torchao_blockwise.ops.device.random_bits import block_words, load_key
from torchao_blockwise.ops.device.scales import nvfp4_scales
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.quantization.kernels_amax import amaxes_of_each

_BLOCK = tl.constexpr(16)
_BITS = tl.constexpr(8)
# (chunks, columns, warps) of a tile.
TILE = (4, 128, 4)
# Counts for masks and numbers of blocks: their divisibility says nothing of memory.
ANY = ("M", "groups", "row", "column", "grid")


@triton.jit
def load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk):
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
def transform(tiles, dtype: tl.constexpr, HADAMARD: tl.constexpr):
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
def largest_of(tiles):
    """`magnitude_bits` of the largest of 16 values; NaN propagates."""
    largest = magnitude_bits(tiles[0])
    for i in tl.static_range(1, _BLOCK):
        largest = tl.maximum(largest, magnitude_bits(tiles[i]))
    return largest


@triton.jit
def locate_chunks(blocks_ptr, chunks, M):
    """(first token, end of the tokens that count) of each chunk of 16."""
    if blocks_ptr is None:
        return chunks * _BLOCK, chunks * 0 + M
    else:
        firsts, ends, _ = load_block(blocks_ptr, chunks)
        return firsts, ends


@triton.jit(do_not_specialize=ANY)
def _columnwise_kernel(
    x_ptr,  # [B, M, K]
    amax_ptr,  # f32 scalar; PER_GROUP [chunks] where tokens lie in groups, else [B]
    qt_ptr,  # int64 [B, K, chunks], 16 codes each
    st_ptr,  # [B, K, chunks] e4m3 bytes
    blocks_ptr,  # None, or where tokens lie in groups their table
    ends_ptr,  # None, or int32 [groups]
    key_ptr,  # int64 [4], or None for round to nearest
    M,
    K,
    runs,  # of the copy: pairs of chunks, so that it is known that rows are multiples of 16 bytes; of groups chunks
    groups,
    stride_xb,
    stride_xm,
    stride_xk,
    row,  # of the copy in the whole,
    column,  # in chunks,
    grid,  # and how many chunks a row of the whole has; -1: as many as there are tokens for
    OPERAND: tl.constexpr,
    HADAMARD: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    E_PAD: tl.constexpr,
    BATCHED: tl.constexpr,
    PER_GROUP: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLUMNS)
    chunks = runs * 2 if blocks_ptr is None else runs
    tile_c = tl.program_id(0) // tiles_k
    if BATCHED:
        tiles_c = tl.cdiv(chunks, CHUNKS)
        batch, tile_c = (tile_c // tiles_c).to(tl.int64), tile_c % tiles_c
        x_ptr += batch * stride_xb
        qt_ptr += batch * K * chunks
        st_ptr += batch * K * chunks
        if PER_GROUP:
            amax_ptr += batch
    offs_c = tile_c * CHUNKS + tl.arange(0, CHUNKS)
    offs_k = (tl.program_id(0) % tiles_k) * COLUMNS + tl.arange(0, COLUMNS)
    firsts, ends = locate_chunks(blocks_ptr, tl.minimum(offs_c, chunks - 1), M)
    tiles = load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk)
    if HADAMARD:
        tiles = transform(tiles, x_ptr.dtype.element_ty, HADAMARD)
    amax = largest_of(tiles)
    if PER_GROUP and blocks_ptr is not None:
        tensor_amax = tl.load(amax_ptr + offs_c, mask=offs_c < chunks, other=0.0)[:, None]
    else:
        tensor_amax = tl.load(amax_ptr)
    encode, scale = nvfp4_scales(amax, tensor_amax, ELEMENT_MAX, SCALE_MAX)  # [CHUNKS, COLUMNS]

    words = (encode, encode, encode, encode)
    if key_ptr is not None:
        seed, stream, use, expert = load_key(key_ptr, OPERAND)
        if ends_ptr is None:
            first_chunk, high = offs_c * 0, offs_c * 0
            wide = tl.cdiv(M, _BLOCK) + offs_c * 0
        else:
            group, start = groups_of(firsts, ends_ptr, M, groups, E_PAD)
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
    offsets = offs_k.to(tl.int64)[:, None] * chunks + offs_c[None, :]
    mask = (offs_k < K)[:, None] & (offs_c < chunks)[None, :]
    tl.store(qt_ptr + offsets, tl.trans(packed), mask=mask)
    tl.store(st_ptr + offsets, tl.trans(scale), mask=mask)


def columnwise_copy(
    x: torch.Tensor,
    amax: torch.Tensor,
    copy: Operand,
    options: CastOptions,
    blocks: torch.Tensor | None,
    key: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    place: Place | None = None,
) -> None:
    """Write the columnwise copy of `x` [.., M, K], not empty, which is padded; of tokens in groups it always is.

    amax: f32 scalar, or of each matrix, or of each group. blocks: of tokens in groups their table; ends: of these
        groups, where there is a key, or an amax of each.
    options, key, place: as in `ops.randomization`; without a key round to nearest.
    """
    fmt, (*batch, M, K) = copy.format, x.shape
    x = x.flatten(0, -3) if batch else x
    B, strides = (x.shape[0], x.stride()) if batch else (1, (0, *x.stride()))
    operand, *where = Place() if place is None else place
    count = 1 if ends is None else ends.shape[0]
    width = copy.scale.shape[-1]
    if amax.dim() and blocks is not None:
        assert ends is not None
        amax = amaxes_of_each(amax, ends, blocks, M, width)
    ends = None if key is None else ends
    chunks, columns, warps = TILE
    launch(
        _columnwise_kernel, B * ceil_div(width, chunks) * ceil_div(K, columns),
        x, amax, (copy.qdata, torch.int64), (copy.scale, torch.uint8), blocks, ends, key,
        M, K, width // 2 if blocks is None else width, count, *strides, *where,
        OPERAND=operand, HADAMARD=options.hadamard, CHUNKS=chunks, COLUMNS=columns, ELEMENT_MAX=fmt.element.max,
        SCALE_MAX=fmt.scale_max, E_PAD=triton.next_power_of_2(count), BATCHED=B > 1, PER_GROUP=amax.dim() > 0,
        num_warps=warps,
        # An operation that shows two roundings must not become one FMA with one.
        enable_fp_fusion=False,
    )  # fmt: skip
