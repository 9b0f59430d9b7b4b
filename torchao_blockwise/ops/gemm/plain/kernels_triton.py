"""NT products of block-scaled operands in Triton: a[M, K] @ b[N, K].T, fp32 accumulation, output rounded once.

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

Where the GPU has no FP8 tensor cores (below sm_89), and in the interpreter (which has no e4m3 NaN), DECODE turns e4m3
bytes to f16 in the tile too. f16 and not bf16: as exact here, and its products by a scale stay f16 instructions.

`M` counts tokens in two of a layer's three products and is never specialized. `K` counts them in the third: payload
rows that do not fill 16 bytes are padded, so that all are copied 16 bytes at a time, by one build for every count.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, BlockFormat, Operand
from torchao_blockwise.ops.backend import compute_capability, interpreting
from torchao_blockwise.ops.device.elements import decode_e2m1, decode_e4m3, from_f32
from torchao_blockwise.ops.gemm.rows import aligned_rows
from torchao_blockwise.ops.launch import ceil_div, launch


class Config(NamedTuple):
    max_m: float  # the first row with M <= max_m is taken
    tile_m: int
    tile_n: int
    blocks_k: int  # blocks of K in a tile; 1 for FP8, where a sum ends with its block
    warps: int
    stages: int


_ANY = float("inf")
_FP8_CONFIGS = (
    # Few rows: bound by reading b, so narrow tiles, to have one for every multiprocessor.
    Config(16, 16, 64, 1, 4, 5),
    Config(64, 64, 64, 1, 4, 4),
    # 8 warps hold partial and accumulator in 64 registers each.
    Config(_ANY, 128, 128, 1, 8, 4),
)
# Below sm_89.
_FP8_DECODE_CONFIGS = (
    Config(16, 16, 64, 1, 4, 4),
    Config(_ANY, 64, 128, 1, 8, 3),
)
# Dots of FP4 tensor cores have 128 rows on sm_100. Not measured: chosen without such a GPU.
_NVFP4_SCALED_CONFIGS = (
    Config(64, 128, 32, 16, 4, 4),
    Config(_ANY, 128, 128, 16, 8, 4),
)
# sm_90.
_NVFP4_CONFIGS = (
    Config(16, 16, 32, 8, 4, 4),
    Config(64, 64, 64, 8, 4, 4),
    Config(_ANY, 128, 128, 8, 8, 3),
)
# Below sm_90 a dot takes both operands from registers: these are as many as fit.
_NVFP4_REGISTER_CONFIGS = (
    Config(16, 16, 32, 4, 4, 4),
    Config(_ANY, 64, 64, 4, 8, 3),
)

# Tile rows of the output whose tiles are computed side by side, so that they find b's tiles in the L2 cache.
GROUP = 8

# e2m1 bits read as f16 are 2^14 too small, and f16 holds e4m3 scales times 2^7 at most: an operand lacks 2^7.
_DECODED_SCALE = tl.constexpr(2.0**7)
_MISSING_FACTOR = tl.constexpr(2.0**14)
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def locate_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile row, tile column) of tile number `tile`, GROUP rows of tiles at a time, column by column."""
    first_m = tile // (GROUP * tiles_n) * GROUP
    group_rows = min(tiles_m - first_m, GROUP)
    in_group = tile % (GROUP * tiles_n)
    return first_m + in_group % group_rows, in_group // group_rows


@triton.jit
def _load_e4m3(ptrs, mask, DECODE: tl.constexpr):
    """A tile of e4m3 payload, as it is or as f16."""
    payload = tl.load(ptrs, mask=mask, other=0.0)
    return decode_e4m3(payload, 1.0) if DECODE else payload


@triton.jit
def store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, end_m, N, ACCUMULATE: tl.constexpr):
    """Rows below `end_m` of out [.., N] (+)= acc + bias, rounded once to the dtype of `out_ptr`."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < end_m)[:, None] & (offs_n < N)[None, :]
    offsets = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, from_f32(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def accumulate_fp8(
    a_ptr,  # [M, K] e4m3, its bytes where DECODE
    a_scale_ptr,  # [K/BLOCK, M] f32
    b_ptr,  # [N, K] like a
    b_scale_ptr,  # [K/BLOCK, N] f32, or [N/BLOCK, K/BLOCK] where B_SQUARE
    offs_m,
    offs_n,
    first_n,  # the first of offs_n
    end_m,  # rows of a, and
    first_k,  # the part of K, from one block's border
    end_k,  # to another's or to the end, that take part
    M,
    N,
    K,
    B_SQUARE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Σ over k in [first_k, end_k) of a[m, k] · b[n, k] with their scales, fp32 [TILE_M, TILE_N]."""
    # A tile of b has one scale where blocks are square.
    tl.static_assert(BLOCK % TILE_N == 0)
    offs_k = tl.arange(0, BLOCK)
    a_ptrs = a_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    a_rows, b_rows = offs_m < end_m, offs_n < N

    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(first_k, end_k, BLOCK):
        columns = (offs_k < K - k)[None, :]
        a = _load_e4m3(a_ptrs + k, a_rows[:, None] & columns, DECODE)
        b = _load_e4m3(b_ptrs + k, b_rows[:, None] & columns, DECODE)
        # Scales are read before the dot, which hides their way from memory.
        block_k = tl.cast(k // BLOCK, tl.int64)
        a_scale = tl.load(a_scale_ptr + block_k * M + offs_m, mask=a_rows, other=0.0)
        if B_SQUARE:
            block_n = tl.cast(first_n // BLOCK, tl.int64)
            b_scale = tl.load(b_scale_ptr + block_n * tl.cdiv(K, BLOCK) + block_k)
        else:
            b_scale = tl.load(b_scale_ptr + block_k * N + offs_n, mask=b_rows, other=0.0)
        partial = tl.dot(a, tl.trans(b), out_dtype=tl.float32)
        if B_SQUARE:
            # One multiplication an element; scales whose product overflows belong to products that do.
            acc += partial * (a_scale * b_scale)[:, None]
        else:
            acc += partial * a_scale[:, None] * b_scale[None, :]
    return acc


@triton.jit(do_not_specialize=["M"])
def _matmul_fp8_kernel(
    a_ptr,  # [M, K] e4m3, its bytes where DECODE
    a_scale_ptr,  # [K/BLOCK, M] f32
    b_ptr,  # [N, K] like a
    b_scale_ptr,  # [K/BLOCK, N] f32, or [N/BLOCK, K/BLOCK] where B_SQUARE
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    M,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = locate_tile(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_n = tile_n * TILE_N + tl.arange(0, TILE_N)
    acc = accumulate_fp8(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, tile_n * TILE_N, M, 0, K, M, N, K,
        B_SQUARE, DECODE, BLOCK, TILE_M, TILE_N,
    )  # fmt: skip
    store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, M, N, ACCUMULATE)


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
    b_scale_ptr,  # [N/B_BLOCK_ROWS, grid_k] e4m3 bytes
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
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    B_BLOCK_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Σ over a part of K of a[m, k] · b[n, k] with their block scales: fp32 [TILE_M, TILE_N]."""
    BYTES: tl.constexpr = TILE_K // 2
    BLOCK_BYTES: tl.constexpr = BLOCK // 2
    BLOCKS_K: tl.constexpr = TILE_K // BLOCK
    grid_n = tl.cdiv(N, B_BLOCK_ROWS)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for byte in range(first_byte, end_byte, BYTES):
        block = byte // BLOCK_BYTES
        a = _load_pairs(a_ptr, offs_m, byte, end_m, end_byte, packed_k, BYTES)
        b = _load_pairs(b_ptr, offs_n, byte, N, end_byte, packed_k, BYTES)
        a_scale = _load_scales(a_scale_ptr, offs_m, block, end_m, end_block, grid_k, BLOCKS_K)
        if DECODE:
            b_scale = _load_scales(b_scale_ptr, blocks_n, block, grid_n, end_block, grid_k, BLOCKS_K)
            a_even, a_odd = _decoded(a, a_scale, 1, BLOCK_BYTES)
            b_even, b_odd = _decoded(b, b_scale, B_BLOCK_ROWS, BLOCK_BYTES)
            acc = tl.dot(a_even, tl.trans(b_even), acc)
            acc = tl.dot(a_odd, tl.trans(b_odd), acc)
        else:
            # A scale for each row.
            b_scale = _load_scales(b_scale_ptr, offs_n // B_BLOCK_ROWS, block, grid_n, end_block, grid_k, BLOCKS_K)
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(a, a_scale, _E2M1, tl.trans(b), b_scale, _E2M1, acc)
    return acc * _MISSING_FACTOR if DECODE else acc


@triton.jit(do_not_specialize=["M", "grid_k"])
def _matmul_nvfp4_kernel(
    a_ptr,  # [M, ⌈K/2⌉] two codes a byte
    a_scale_ptr,  # [M, K/BLOCK] e4m3 bytes
    a_global_ptr,  # f32 scalar
    b_ptr,  # [N, ⌈K/2⌉] two codes a byte
    b_scale_ptr,  # [N/B_BLOCK_ROWS, K/BLOCK] e4m3 bytes
    b_global_ptr,  # f32 scalar
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    M,
    N,
    packed_k,  # bytes in a row of payload, and
    grid_k,  # scales in a row: the last bytes may be padding
    ACCUMULATE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    B_BLOCK_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = locate_tile(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    offs_m = tile_m * TILE_M + tl.arange(0, TILE_M)
    offs_n = tile_n * TILE_N + tl.arange(0, TILE_N)
    blocks_n = tile_n * (TILE_N // B_BLOCK_ROWS) + tl.arange(0, TILE_N // B_BLOCK_ROWS)
    acc = accumulate_nvfp4(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, blocks_n, M, 0, packed_k, grid_k, N, packed_k, grid_k,
        DECODE, BLOCK, B_BLOCK_ROWS, TILE_M, TILE_N, TILE_K,
    )  # fmt: skip
    acc *= tl.load(a_global_ptr) * tl.load(b_global_ptr)
    store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, M, N, ACCUMULATE)


def decodes(fmt: BlockFormat, device: torch.device) -> bool:
    """Whether kernels turn elements of `fmt` to f16 on `device`, which has no dot of them."""
    return interpreting() or compute_capability(device) < ((10, 0) if fmt.element is E2M1 else (8, 9))


def config_for(fmt: BlockFormat, rows: int, device: torch.device) -> Config:
    """The tile for a product whose first operand, in `fmt`, has `rows` rows."""
    decode = decodes(fmt, device)
    if fmt.element is not E2M1:
        configs = _FP8_DECODE_CONFIGS if decode else _FP8_CONFIGS
    elif decode:
        configs = _NVFP4_CONFIGS if compute_capability(device) >= (9, 0) else _NVFP4_REGISTER_CONFIGS
    else:
        configs = _NVFP4_SCALED_CONFIGS
    return next(c for c in configs if c.max_m >= rows)


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """[M, N] product of a [M, packed(K)], of one-row blocks, and b [N, packed(K)]. Arguments as in the op."""
    out = a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)
    _launch(out, a, b, bias, accumulate=False)
    return out


def add_matmul(out: torch.Tensor, a: Operand, b: Operand) -> None:
    """out [M, N] f32 += a @ b.T, in the one pass that the product takes."""
    _launch(out, a, b, None, accumulate=True)


def _launch(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, accumulate: bool) -> None:
    if out.numel() == 0:
        return
    (M, N), a_fmt, b_fmt = out.shape, a.format, b.format
    qa, qb = aligned_rows(a.qdata), aligned_rows(b.qdata)
    a_scale, b_scale = a.scale.contiguous(), b.scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    decode = decodes(a_fmt, out.device)
    config = config_for(a_fmt, M, out.device)
    grid = ceil_div(M, config.tile_m) * ceil_div(N, config.tile_n)
    tiles = {
        "ACCUMULATE": accumulate,
        "DECODE": decode,
        "BLOCK": a_fmt.block[1],
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "GROUP": GROUP,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if a_fmt.element is E2M1:
        launch(
            _matmul_nvfp4_kernel, grid,
            qa, a_scale.view(torch.uint8), a.global_scale, qb, b_scale.view(torch.uint8), b.global_scale, bias, out,
            M, N, qa.shape[1], a_scale.shape[1],
            B_BLOCK_ROWS=b_fmt.block[0], TILE_K=config.blocks_k * a_fmt.block[1], **tiles,
        )  # fmt: skip
    else:
        if decode:
            qa, qb = qa.view(torch.uint8), qb.view(torch.uint8)
        launch(
            _matmul_fp8_kernel, grid,
            qa, a_scale, qb, b_scale, bias, out, M, N, qa.shape[1], B_SQUARE=b_fmt.is_square, **tiles,
        )  # fmt: skip
