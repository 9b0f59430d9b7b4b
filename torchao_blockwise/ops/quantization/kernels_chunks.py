"""Columnwise NVFP4 copies in Triton: plain, of the random Hadamard transform, and rounded stochastically; and amaxes.

    x  [M, K] ── 16 tokens as 16 tiles [chunks, columns] ──▶ (butterflies) ──▶ amax, codes of a block in one thread

A columnwise block is a chunk of 16 tokens of one column, and one thread holds all 16 values. So the transform, the amax
and packing need no exchange between threads, the scale and the random bits are computed once, and the codes are stored
as 8 bytes.
"""

# ruff: noqa: RUF005  # Triton does not support unpacking.

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import NVFP4_1X16, CastOptions, Groups, Operand, Place
from torchao_blockwise.ops.device.elements import (
    encode_e2m1,
    encode_e2m1_stochastically,
    magnitude_bits,
    round_both,
    to_f32,
)
from torchao_blockwise.ops.device.groups import groups_of, load_block
from torchao_blockwise.ops.device.scales import nvfp4_scales
from torchao_blockwise.ops.device.tiles import matrices_of
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.quantization.kernels_amax import amaxes_of_each

_BLOCK = tl.constexpr(16)
_BITS = tl.constexpr(8)
_WORD = tl.constexpr(0xFFFFFFFF)
# (chunks, columns, warps) of a tile, and the number of programs that compute amaxes.
_TILE, _AMAX_PROGRAMS = (4, 128, 4), 528
# Used only for masks and numbers of blocks, so their divisibility does not matter for memory accesses.
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
    """(first token, end of the tokens with values) of each chunk of 16."""
    if blocks_ptr is None:
        return chunks * _BLOCK, chunks * 0 + M
    else:
        firsts, ends, _ = load_block(blocks_ptr, chunks)
        return firsts, ends


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
        # There may be no entry for chunks after the last one.
        firsts, ends = locate_chunks(blocks_ptr, tl.minimum(offs_c, chunks - 1), M)
        tiles = load_chunks(x_ptr, firsts, ends, offs_k, K, stride_xm, stride_xk)
        if PER_GROUP:
            # Each chunk is in one group; chunks after the last group have no tokens.
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


# Random bits: those of formats/random_bits.py, a call of Philox for each block of 16.


@triton.jit
def load_key(key_ptr, OPERAND: tl.constexpr):
    """(seed, stream, use, number of the first expert) of a copy; stream and use as words."""
    seed, stream, use = tl.load(key_ptr), tl.load(key_ptr + 1) + OPERAND, tl.load(key_ptr + 2)
    return seed, (stream & _WORD).to(tl.uint32), (use & _WORD).to(tl.uint32), tl.load(key_ptr + 3).to(tl.int32)


@triton.jit
def block_words(block, seed, stream, use):
    """The four words of random bits of blocks, int64 numbers: uint32 of their shape, byte i of all is element i's."""
    low, high = (block & _WORD).to(tl.uint32), ((block >> 32) & _WORD).to(tl.uint32)
    none = tl.zeros_like(low)
    return tl.philox(seed, low, high, none + stream, none + use)


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
    # After the last group, a transform may have turned zeros into -0.
    packed = tl.where((firsts < ends)[:, None], packed, 0)
    offsets = offs_k.to(tl.int64)[:, None] * chunks + offs_c[None, :]
    mask = (offs_k < K)[:, None] & (offs_c < chunks)[None, :]
    tl.store(qt_ptr + offsets, tl.trans(packed), mask=mask)
    tl.store(st_ptr + offsets, tl.trans(scale), mask=mask)


def hadamard_amax_bits(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in the op."""
    ends = groups.ends if per_group and groups is not None else None
    shape, experts = ((), 1) if ends is None else (ends.shape, ends.shape[0])
    # Separate allocations, because compilers assume that results of operations have the alignment of an allocation.
    plain, transformed = (torch.zeros(shape, dtype=torch.int32, device=x.device) for _ in range(2))
    M, K = x.shape
    if x.numel() > 0:
        chunks, columns, warps = _TILE
        blocks = None if groups is None else block_table(groups, M, NVFP4_1X16)
        # The first entry of the table describes all tokens.
        count = ceil_div(M, NVFP4_1X16.block[1]) if blocks is None else blocks.shape[0] - 1
        grid = min(ceil_div(count, chunks) * ceil_div(K, columns), _AMAX_PROGRAMS)
        launch(
            _amaxes_kernel, grid, x, plain, transformed, blocks, ends, M, K, count, experts, *x.stride(),
            HADAMARD=hadamard, CHUNKS=chunks, COLUMNS=columns, PER_GROUP=ends is not None,
            E_PAD=triton.next_power_of_2(experts), num_warps=warps,
        )  # fmt: skip
    return plain, transformed


def write_columnwise(
    x: torch.Tensor,
    amax: torch.Tensor,
    copy: Operand,
    options: CastOptions,
    groups: Groups | None,
    blocks: torch.Tensor | None,
    key: torch.Tensor | None,
    place: Place,
) -> None:
    """Write the padded columnwise copy of `x` [.., M, K], not empty; without a key, round to nearest.

    amax: f32 scalar, or that of each matrix or group. blocks: the table of groups, or None.
    """
    fmt, (*_, M, K), width = copy.format, x.shape, copy.scale.shape[-1]
    x, B, strides = matrices_of(x)
    if amax.dim() and groups is not None:
        amax = amaxes_of_each(amax, groups.ends, blocks, M, width)
    operand, *where = place
    ends, count = (None, 1) if groups is None or key is None else (groups.ends, groups.ends.shape[0])
    chunks, columns, warps = _TILE
    launch(
        _columnwise_kernel, B * ceil_div(width, chunks) * ceil_div(K, columns),
        x, amax, (copy.qdata, torch.int64), (copy.scale, torch.uint8), blocks, ends, key,
        M, K, width // 2 if blocks is None else width, count, *strides, *where,
        OPERAND=operand, HADAMARD=options.hadamard, CHUNKS=chunks, COLUMNS=columns, ELEMENT_MAX=fmt.element.max,
        SCALE_MAX=fmt.scale_max, E_PAD=triton.next_power_of_2(count), BATCHED=B > 1, PER_GROUP=amax.dim() > 0,
        num_warps=warps,
        # An FMA would round once where the formula has two roundings.
        enable_fp_fusion=False,
    )  # fmt: skip
