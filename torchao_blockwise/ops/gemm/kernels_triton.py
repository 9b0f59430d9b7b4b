"""NT GEMMs of block-scaled operands in Triton, plain and grouped: fp32 accumulation, output rounded once.

    plain       tiles of out [M, N] = a @ b.T                        along "k"   tiles of out[g], for each group g
    along "m"   tiles of rows: each group in separate tiles
                   N                                                              columns of b: K
              ┌────┬────┐                                                    ┌────┬────┐
              │    │    │  group 0: 2 tiles of rows, ragged                  │    │    │  rows of a: N
              ├────┼────┤                                                    ├────┼────┤
              └────┴────┘                                                    └────┴────┘
              ┌────┬────┐  group 2 (1 is empty)                              a loop over the tokens of group g,
              └────┴────┘                                                    none where it is empty: zeros
              ┌────┬────┐  tokens after the last group: zeros
              └────┴────┘

Only the device knows the number of tiles along "m". The largest possible number is launched, less than one tile more
for each group; unneeded programs return at once.

The accumulation is in `triton_sums.py`. `M` is the number of tokens in two of a layer's three GEMMs, and is never
specialized. In the third, `K` is the number of tokens: rows of payload are padded to 16 bytes, so that one build copies
16 bytes at a time for every count.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, BlockFormat, Groups, Operand
from torchao_blockwise.ops.backend import compute_capability, interpreting
from torchao_blockwise.ops.device.elements import from_f32
from torchao_blockwise.ops.device.groups import locate_padded_group, locate_tile_of_groups
from torchao_blockwise.ops.gemm.triton_sums import accumulate_fp8, accumulate_nvfp4
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import new_output
from torchao_blockwise.ops.padding import aligned_rows


class Config(NamedTuple):
    max_m: float  # the first row with M <= max_m is used
    tile_m: int
    tile_n: int
    blocks_k: int  # blocks of K in a tile; 1 for FP8, where a sum ends with its block
    warps: int
    stages: int


_ANY = float("inf")
_FP8_CONFIGS = (
    # Few rows: limited by reading b, so tiles are narrow, to have one for each multiprocessor.
    Config(16, 16, 64, 1, 4, 5),
    Config(64, 64, 64, 1, 4, 4),
    # In each of 8 warps, a thread holds the partial sum and the accumulator in 64 registers each.
    Config(_ANY, 128, 128, 1, 8, 4),
)
# Below sm_89.
_FP8_DECODE_CONFIGS = (
    Config(16, 16, 64, 1, 4, 4),
    Config(_ANY, 64, 128, 1, 8, 3),
)
# FP4 tensor cores of sm_100 multiply 128 rows. Not measured on such a GPU.
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
# Below sm_90, both operands of a dot are in registers, which limits the tiles.
_NVFP4_REGISTER_CONFIGS = (
    Config(16, 16, 32, 4, 4, 4),
    Config(_ANY, 64, 64, 4, 8, 3),
)


@dataclass(frozen=True, eq=False)
class Build:
    """The constants of a kernel."""

    tile_m: int
    tile_n: int
    tile_k: int  # only NVFP4; a sum of FP8 ends with its block
    block: int  # of K
    block_rows: int  # of a block of b
    decode: bool
    along_m: bool
    accumulate: bool
    e_pad: int  # a power of two, at least the number of groups
    a_per_group: bool = False  # NVFP4: whether each group has a tensor scale
    b_per_group: bool = False


# Launches tell builds apart by identity.
_build = functools.cache(Build)

# Tile rows of the output whose tiles are computed side by side, so that they find b's tiles in the L2 cache.
_GROUP: tl.constexpr = tl.constexpr(8)
# Locating a group takes registers, so tiles are smaller with groups: fewer blocks of K in NVFP4 that is decoded, and
# fewer columns in FP8 with one-row blocks from sm_100 on, where a thread has a row of a tile and a scale for each
# column.
_GROUPED_BLOCKS_K, _GROUPED_TILE_N = 4, 64


@triton.jit
def _locate_tile(tile, tiles_m, tiles_n):
    """(tile row, tile column) of tile number `tile`, _GROUP rows of tiles at a time, column by column."""
    first_m = tile // (_GROUP * tiles_n) * _GROUP
    group_rows = min(tiles_m - first_m, _GROUP)
    in_group = tile % (_GROUP * tiles_n)
    return first_m + in_group % group_rows, in_group // group_rows


@triton.jit
def _locate_in_group(
    ends_ptr,
    M,
    N,
    columns,  # of a and b along the contraction, in elements
    groups,
    B: tl.constexpr,
):
    """(group, first row, end of rows, first column, first and last block of the contraction, without the last) of this
    program's tile. Both ranges may be empty.
    """
    tiles_n = tl.cdiv(N, B.tile_n)
    if B.along_m:
        # The tiles of a group are consecutive, so neighbors usually read the same tiles of b.
        tile, tile_n = _locate_tile(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n)
        group, first_m, end_m = locate_tile_of_groups(ends_ptr, tile, M, groups, B.tile_m, B.e_pad)
        first_block = 0
        end_block = tl.where(group < groups, tl.cdiv(columns, B.block), 0)
    else:
        tiles_m = tl.cdiv(M, B.tile_m)
        group = tl.program_id(0) // (tiles_m * tiles_n)
        tile_m, tile_n = _locate_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n)
        first_m, end_m = tile_m * B.tile_m, M
        first_block, end_block = locate_padded_group(ends_ptr, group, columns, groups, B.block, B.e_pad)
        # Invalid ends must not lead outside the columns.
        end_block = min(end_block, columns // B.block)
    return group, first_m, end_m, tile_n * B.tile_n, first_block, end_block


@triton.jit
def _store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, end_m, N, ACCUMULATE: tl.constexpr):
    """Rows below `end_m` of out [.., N] (+)= acc + bias, rounded once to the dtype of `out_ptr`."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < end_m)[:, None] & (offs_n < N)[None, :]
    offsets = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, from_f32(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _matmul_fp8_kernel(
    a_ptr,  # [M, K] e4m3, its bytes where B.decode
    a_scale_ptr,  # [K/BLOCK, M] f32
    b_ptr,  # [N, K] like a, along "m" [E, N, K]
    b_scale_ptr,  # [.., K/BLOCK, N] f32, or [.., N/BLOCK, K/BLOCK] of square blocks
    bias_ptr,  # [N] or None
    ends_ptr,  # [E] int32; None without groups
    out_ptr,  # [M, N], along "k" [E, M, N]
    M,
    N,
    K,
    groups,
    B: tl.constexpr,  # a Build
):
    if ends_ptr is None:
        tile_m, tile_n = _locate_tile(tl.program_id(0), tl.cdiv(M, B.tile_m), tl.cdiv(N, B.tile_n))
        offs_m = tile_m * B.tile_m + tl.arange(0, B.tile_m)
        first_n, rows, first_k, end_k = tile_n * B.tile_n, M, 0, K
        offs_n = first_n + tl.arange(0, B.tile_n)
    else:
        group, first_m, end_m, first_n, first_block, end_block = _locate_in_group(ends_ptr, M, N, K, groups, B)
        if first_m >= end_m:
            return
        if B.accumulate and first_block >= end_block:
            return
        offs_m, offs_n = tl.arange(0, B.tile_m), first_n + tl.arange(0, B.tile_n)
        a_ptr += tl.cast(first_m, tl.int64) * K
        a_scale_ptr += first_m
        out_ptr += tl.cast(first_m, tl.int64) * N
        if B.along_m:
            # After the last group this is outside of b, but the empty loop does not read it.
            b_ptr += group.to(tl.int64) * N * K
            b_scale_ptr += group.to(tl.int64) * tl.cdiv(N, B.block_rows) * tl.cdiv(K, B.block)
        else:
            out_ptr += group.to(tl.int64) * M * N
        rows, first_k, end_k = end_m - first_m, first_block * B.block, end_block * B.block
    acc = accumulate_fp8(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, first_n, rows, first_k, end_k, M, N, K, B,
    )  # fmt: skip
    _store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, rows, N, B.accumulate)


@triton.jit(do_not_specialize=["M", "grid_k"])
def _matmul_nvfp4_kernel(
    a_ptr,  # [M, ⌈K/2⌉] two codes a byte
    a_scale_ptr,  # [M, K/BLOCK] e4m3 bytes
    a_global_ptr,  # f32 scalar; B.a_per_group [E]
    b_ptr,  # [N, ⌈K/2⌉] two codes a byte, along "m" [E, N, ⌈K/2⌉]
    b_scale_ptr,  # [.., N/block_rows, K/BLOCK] e4m3 bytes
    b_global_ptr,  # f32 scalar; B.b_per_group [E]
    bias_ptr,  # [N] or None
    ends_ptr,  # [E] int32; None without groups
    out_ptr,  # [M, N], along "k" [E, M, N]
    M,
    N,
    packed_k,  # bytes in a row of payload, and
    grid_k,  # scales in a row: the last bytes may be padding
    groups,
    B: tl.constexpr,  # a Build
):
    BLOCK_BYTES: tl.constexpr = B.block // 2
    BLOCKS_N: tl.constexpr = B.tile_n // B.block_rows
    if ends_ptr is None:
        tile_m, tile_n = _locate_tile(tl.program_id(0), tl.cdiv(M, B.tile_m), tl.cdiv(N, B.tile_n))
        offs_m = tile_m * B.tile_m + tl.arange(0, B.tile_m)
        first_n, rows, first_byte, end_byte, end_block = tile_n * B.tile_n, M, 0, packed_k, grid_k
        offs_n = first_n + tl.arange(0, B.tile_n)
        blocks_n = tile_n * BLOCKS_N + tl.arange(0, BLOCKS_N)
    else:
        group, first_m, end_m, first_n, first_block, end_block = _locate_in_group(
            ends_ptr, M, N, grid_k * B.block, groups, B
        )
        if first_m >= end_m:
            return
        if B.accumulate and first_block >= end_block:
            return
        offs_m, offs_n = tl.arange(0, B.tile_m), first_n + tl.arange(0, B.tile_n)
        a_ptr += tl.cast(first_m, tl.int64) * packed_k
        a_scale_ptr += tl.cast(first_m, tl.int64) * grid_k
        out_ptr += tl.cast(first_m, tl.int64) * N
        blocks_n = first_n // B.block_rows + tl.arange(0, BLOCKS_N)
        if B.along_m:
            b_ptr += group.to(tl.int64) * N * packed_k
            b_scale_ptr += group.to(tl.int64) * tl.cdiv(N, B.block_rows) * grid_k
        else:
            out_ptr += group.to(tl.int64) * M * N
        rows, first_byte, end_byte = end_m - first_m, first_block * BLOCK_BYTES, end_block * BLOCK_BYTES
    acc = accumulate_nvfp4(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, blocks_n, rows,
        first_byte, end_byte, end_block, N, packed_k, grid_k, B,
    )  # fmt: skip
    if ends_ptr is None:
        acc *= tl.load(a_global_ptr) * tl.load(b_global_ptr)
    else:
        # Tokens after the last group have no scale.
        scaled_by = tl.where(first_block < end_block, group, 0)
        if B.a_per_group:
            a_global_ptr += scaled_by
        if B.b_per_group:
            b_global_ptr += scaled_by
        # Empty sums are zero even if scales are NaN.
        acc *= tl.where(first_block < end_block, tl.load(a_global_ptr) * tl.load(b_global_ptr), 0.0)
    _store_output(out_ptr, bias_ptr, acc, offs_m, offs_n, rows, N, B.accumulate)


def decodes(fmt: BlockFormat, device: torch.device) -> bool:
    """Whether kernels decode elements of `fmt` to f16, because `device` has no tensor cores for them."""
    return interpreting() or compute_capability(device) < ((10, 0) if fmt.element is E2M1 else (8, 9))


def _config_for(fmt: BlockFormat, rows: int, device: torch.device) -> Config:
    """Return the config of a GEMM whose first operand, in `fmt`, has this number of rows."""
    decode = decodes(fmt, device)
    if fmt.element is not E2M1:
        configs = _FP8_DECODE_CONFIGS if decode else _FP8_CONFIGS
    elif decode:
        configs = _NVFP4_CONFIGS if compute_capability(device) >= (9, 0) else _NVFP4_REGISTER_CONFIGS
    else:
        configs = _NVFP4_SCALED_CONFIGS
    return next(c for c in configs if c.max_m >= rows)


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Return a · bᵀ [M, N] for a [M, packed(K)], with one-row blocks, and b [N, packed(K)]. Arguments as in the op."""
    out = new_output(a, b, out_dtype)
    _launch(out, a, b, bias=bias)
    return out


def grouped_matmul(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Arguments and result as in the op; `a` has one-row blocks."""
    out = new_output(a, b, out_dtype, groups, along)
    _launch(out, a, b, groups, along)
    return out


def add_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups | None = None) -> None:
    """out f32 += a · bᵀ, with groups along "k", in one pass."""
    _launch(out, a, b, groups, "" if groups is None else "k", accumulate=True)


def _launch(
    out: torch.Tensor,
    a: Operand,
    b: Operand,
    groups: Groups | None = None,
    along: str = "",
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    if out.numel() == 0:
        return
    (M, N), a_fmt, b_fmt = out.shape[-2:], a.format, b.format
    ends, experts = (None, 1) if groups is None else (groups.ends, groups.ends.shape[0])
    decode = decodes(a_fmt, out.device)
    # The host knows only the mean size of groups. A tile that is taller than a group wastes work: half of it for 64
    # tokens an expert and tiles of 128 rows. A group with several tiles reads its matrix several times, but from the L2
    # cache.
    config = _config_for(a_fmt, ceil_div(M, experts) if along == "m" else M, out.device)
    is_fp4 = a_fmt.element is E2M1
    if ends is not None and is_fp4 and decode:
        config = config._replace(blocks_k=min(config.blocks_k, _GROUPED_BLOCKS_K))
    elif not (ends is None or is_fp4 or b_fmt.is_square) and compute_capability(out.device) >= (10, 0):
        config = config._replace(tile_n=min(config.tile_n, _GROUPED_TILE_N))
    if along == "m":
        # Tokens after the last group have separate tiles.
        tiles_m = padded_tokens(M, experts + 1, config.tile_m) // config.tile_m
    else:
        tiles_m = experts * ceil_div(M, config.tile_m)
    qa, qb = aligned_rows(a.qdata), aligned_rows(b.qdata.flatten(0, -2))
    a_scale, b_scale = a.scale.contiguous(), b.scale.contiguous()
    grid = tiles_m * ceil_div(N, config.tile_n)
    behind = None if bias is None else bias.contiguous(), ends, out, M, N, qa.shape[1]
    count = None if ends is None else experts
    build = (
        config.tile_m, config.tile_n, config.blocks_k * a_fmt.block[1], a_fmt.block[1], b_fmt.block[0], decode,
        along == "m", accumulate, triton.next_power_of_2(experts),
    )  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if is_fp4:
        assert a.global_scale is not None and b.global_scale is not None
        launch(
            _matmul_nvfp4_kernel, grid,
            qa, a_scale.view(torch.uint8), a.global_scale, qb, b_scale.view(torch.uint8), b.global_scale,
            *behind, a_scale.shape[1], count,
            B=_build(*build, a.global_scale.dim() > 0, b.global_scale.dim() > 0), **options,
        )  # fmt: skip
    else:
        if decode:
            qa, qb = qa.view(torch.uint8), qb.view(torch.uint8)
        launch(_matmul_fp8_kernel, grid, qa, a_scale, qb, b_scale, *behind, count, B=_build(*build), **options)
