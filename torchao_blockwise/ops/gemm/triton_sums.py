"""The accumulation of a GEMM tile in Triton: Σ over a part of K of a[m, k] · b[n, k] with their scales.

    FP8     for each 128 of K:       acc += (a[m, k] · b[n, k]ᵀ) · scale_a[m, k] · scale_b[n, k]

                 K = 128             A tensor core adds e4m3 products with some 14 bits, so a sum ends with its
            ┌─────────────┐          block of K; the accumulator lies in registers and never passes through tl.dot.
       TILE │ a tile      │ ─┐
        _M  └─────────────┘  ├→ partial [TILE_M, TILE_N] → acc
       TILE ┌─────────────┐  │
        _N  │ b tile      │ ─┘
            └─────────────┘

    NVFP4   FP4 tensor cores (sm_100 up) multiply packed elements and block scales as they lie in memory. Where there
            are none, element · block scale is decoded in the tile to f16, exactly, then acc = dot(a, b, acc). A byte
            holds an even and an odd element of K: their sums are taken by two dots, so that no tile is interleaved.

Where the GPU has no FP8 tensor cores (below sm_89), and in the interpreter (which has no e4m3 NaN), B.decode turns e4m3
bytes to f16 in the tile too. f16 and not bf16: as exact here, and its products by a scale stay f16 instructions.
"""

import triton
import triton.language as tl

from torchao_blockwise.ops.device.elements import decode_e2m1, decode_e4m3

# e2m1 bits read as f16 are 2^14 too small, and f16 holds e4m3 scales times 2^7 at most: an operand lacks 2^7.
_DECODED_SCALE = tl.constexpr(2.0**7)
_MISSING_FACTOR = tl.constexpr(2.0**14)
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def _load_e4m3(ptrs, mask, DECODE: tl.constexpr):
    """A tile of e4m3 payload, as it is or as f16."""
    payload = tl.load(ptrs, mask=mask, other=0.0)
    return decode_e4m3(payload, 1.0) if DECODE else payload


@triton.jit
def accumulate_fp8(
    a_ptr,  # [M, K] e4m3, its bytes where B.decode
    a_scale_ptr,  # [K/BLOCK, M] f32
    b_ptr,  # [N, K] like a
    b_scale_ptr,  # [K/BLOCK, N] f32, or [N/BLOCK, K/BLOCK] of square blocks
    offs_m,
    offs_n,
    first_n,  # the first of offs_n
    end_m,  # rows of a, and
    first_k,  # the part of K, from one block's border
    end_k,  # to another's or to the end, that take part
    M,
    N,
    K,
    B: tl.constexpr,  # a Build
):
    """Σ over k in [first_k, end_k) of a[m, k] · b[n, k] with their scales, fp32 [tile_m, tile_n]."""
    BLOCK: tl.constexpr = B.block
    TILE: tl.constexpr = (B.tile_m, B.tile_n)
    # If blocks are square, a tile of b has one scale.
    tl.static_assert(BLOCK % B.tile_n == 0)
    offs_k = tl.arange(0, BLOCK)
    a_ptrs = a_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    a_rows, b_rows = offs_m < end_m, offs_n < N

    acc = tl.zeros(TILE, dtype=tl.float32)
    for k in range(first_k, end_k, BLOCK):
        columns = (offs_k < K - k)[None, :]
        a = _load_e4m3(a_ptrs + k, a_rows[:, None] & columns, B.decode)
        b = _load_e4m3(b_ptrs + k, b_rows[:, None] & columns, B.decode)
        # Scales are read before the dot, which hides their way from memory.
        block_k = tl.cast(k // BLOCK, tl.int64)
        a_scale = tl.load(a_scale_ptr + block_k * M + offs_m, mask=a_rows, other=0.0)
        if B.block_rows > 1:
            block_n = tl.cast(first_n // BLOCK, tl.int64)
            b_scale = tl.load(b_scale_ptr + block_n * tl.cdiv(K, BLOCK) + block_k)
        else:
            b_scale = tl.load(b_scale_ptr + block_k * N + offs_n, mask=b_rows, other=0.0)
        partial = tl.dot(a, tl.trans(b), out_dtype=tl.float32)
        if B.block_rows > 1:
            # One multiplication an element; scales whose product overflows belong to products that do.
            acc += partial * (a_scale * b_scale)[:, None]
        else:
            acc += partial * a_scale[:, None] * b_scale[None, :]
    return acc


@triton.jit
def _load_pairs(q_ptr, offs_row, byte, end_row, end_byte, packed_k, BYTES: tl.constexpr):
    """Packed elements of an operand's tile that starts at `byte`: uint8 [ROWS, BYTES]."""
    offs_byte = byte + tl.arange(0, BYTES)
    mask = (offs_row < end_row)[:, None] & (offs_byte < end_byte)[None, :]
    return tl.load(q_ptr + offs_row.to(tl.int64)[:, None] * packed_k + offs_byte[None, :], mask=mask, other=0)


@triton.jit
def _load_scales(scale_ptr, blocks_row, first_block, end_row, end_block, grid_k, BLOCKS_K: tl.constexpr):
    """Block scales of these rows of a grid, from `first_block` on: bytes [BLOCKS_ROW, BLOCKS_K]."""
    blocks_k = first_block + tl.arange(0, BLOCKS_K)
    mask = (blocks_row < end_row)[:, None] & (blocks_k < end_block)[None, :]
    return tl.load(scale_ptr + blocks_row.to(tl.int64)[:, None] * grid_k + blocks_k[None, :], mask=mask, other=0)


@triton.jit
def _decoded(pairs, scale, BLOCK_ROWS: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Elements · block scales · 2^-7: f16 (even, odd), each in the shape of `pairs`."""
    BLOCKS_ROW: tl.constexpr = scale.shape[0]
    BLOCKS_K: tl.constexpr = scale.shape[1]
    scale = decode_e4m3(scale, _DECODED_SCALE)[:, None, :, None]
    pairs = pairs.reshape(BLOCKS_ROW, BLOCK_ROWS, BLOCKS_K, BLOCK_BYTES)
    even, odd = decode_e2m1(pairs) * scale, decode_e2m1(pairs >> 4) * scale
    SHAPE: tl.constexpr = (BLOCKS_ROW * BLOCK_ROWS, BLOCKS_K * BLOCK_BYTES)
    return even.reshape(SHAPE), odd.reshape(SHAPE)


@triton.jit
def accumulate_nvfp4(
    a_ptr,  # [M, packed_k] two codes a byte
    a_scale_ptr,  # [M, grid_k] e4m3 bytes
    b_ptr,  # [N, packed_k] two codes a byte
    b_scale_ptr,  # [N/block_rows, grid_k] e4m3 bytes
    offs_m,
    offs_n,
    blocks_n,  # rows of b's scales that belong to offs_n
    end_m,  # rows of a, and
    first_byte,  # the part of K that take part: bytes from one block's border
    end_byte,
    end_block,  # to the other's; padding may lie between the last block and the last byte
    N,
    packed_k,
    grid_k,
    B: tl.constexpr,  # a Build
):
    """Σ over a part of K of a[m, k] · b[n, k] with their block scales: fp32 [tile_m, tile_n]."""
    BYTES: tl.constexpr = B.tile_k // 2
    BLOCK_BYTES: tl.constexpr = B.block // 2
    BLOCKS_K: tl.constexpr = B.tile_k // B.block
    TILE: tl.constexpr = (B.tile_m, B.tile_n)
    grid_n = tl.cdiv(N, B.block_rows)
    acc = tl.zeros(TILE, dtype=tl.float32)
    for byte in range(first_byte, end_byte, BYTES):
        block = byte // BLOCK_BYTES
        a = _load_pairs(a_ptr, offs_m, byte, end_m, end_byte, packed_k, BYTES)
        b = _load_pairs(b_ptr, offs_n, byte, N, end_byte, packed_k, BYTES)
        a_scale = _load_scales(a_scale_ptr, offs_m, block, end_m, end_block, grid_k, BLOCKS_K)
        if B.decode:
            b_scale = _load_scales(b_scale_ptr, blocks_n, block, grid_n, end_block, grid_k, BLOCKS_K)
            a_even, a_odd = _decoded(a, a_scale, 1, BLOCK_BYTES)
            b_even, b_odd = _decoded(b, b_scale, B.block_rows, BLOCK_BYTES)
            acc = tl.dot(a_even, tl.trans(b_even), acc)
            acc = tl.dot(a_odd, tl.trans(b_odd), acc)
        else:
            # A scale for each row.
            b_scale = _load_scales(b_scale_ptr, offs_n // B.block_rows, block, grid_n, end_block, grid_k, BLOCKS_K)
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(a, a_scale, _E2M1, tl.trans(b), b_scale, _E2M1, acc)
    return acc * _MISSING_FACTOR if B.decode else acc
