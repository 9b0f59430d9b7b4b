"""Grouped products in Triton: the loops of the plain products, for tiles that each lie in one group.

    along "m"   tiles of rows: each group in tiles of its own        along "k"   tiles of out[g], for each group g

                   N                                                              columns of b: K
              ┌────┬────┐                                                    ┌────┬────┐
              │    │    │  group 0: 2 tiles of rows, ragged                  │    │    │  rows of a: N
              ├────┼────┤                                                    ├────┼────┤
              └────┴────┘                                                    └────┴────┘
              ┌────┬────┐  group 2 (1 is empty)                              a loop over the tokens of group g alone,
              └────┴────┘                                                    none where it is empty: zeros
              ┌────┬────┐  tokens after the last group: zeros
              └────┴────┘

How many tiles there are along "m", only the device knows. Launched is what the number of tokens and groups allows at
most, less than one tile a group too much; the programs that are left over return at once.

`M` counts tokens along "m", and `K` along "k"; neither changes a build.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, Groups, Operand
from torchao_blockwise.ops.backend import compute_capability
from torchao_blockwise.ops.device.groups import locate_padded_group, locate_tile_of_groups
from torchao_blockwise.ops.gemm.plain.kernels_triton import (
    GROUP,
    accumulate_fp8,
    accumulate_nvfp4,
    config_for,
    decodes,
    locate_tile,
    store_output,
)
from torchao_blockwise.ops.gemm.rows import aligned_rows
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.launch import ceil_div, launch

# What a tile must know of its group takes registers, so tiles are smaller here than the plain products' may be:
# blocks of K of NVFP4 that are decoded at once;
_BLOCKS_K = 4
# columns in FP8, where a thread has a row of them (from sm_100 on) and one-row blocks give each its own scale.
_TILE_N = 64


@triton.jit
def _locate(
    ends_ptr,
    M,
    N,
    columns,  # of a and b along the contraction, in elements
    groups,
    ALONG_M: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """(group, first row, end of rows, first column, first and end of the contraction in blocks) of this program's tile.

    Rows that begin at their end, and a contraction that does, are empty.
    """
    tiles_n = tl.cdiv(N, TILE_N)
    if ALONG_M:
        # Tiles of a group lie one behind the other, so that those side by side read the same tiles of b, as a rule.
        tile, tile_n = locate_tile(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, GROUP)
        group, first_m, end_m = locate_tile_of_groups(ends_ptr, tile, M, groups, TILE_M, E_PAD)
        first_block = 0
        end_block = tl.where(group < groups, tl.cdiv(columns, BLOCK), 0)
    else:
        tiles_m = tl.cdiv(M, TILE_M)
        group = tl.program_id(0) // (tiles_m * tiles_n)
        tile_m, tile_n = locate_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        first_m, end_m = tile_m * TILE_M, M
        first_block, end_block = locate_padded_group(ends_ptr, group, columns, groups, BLOCK, E_PAD)
        # Ends that fit the tokens fit the columns; others must not lead outside of them.
        end_block = min(end_block, columns // BLOCK)
    return group, first_m, end_m, tile_n * TILE_N, first_block, end_block


@triton.jit(do_not_specialize=["M"])
def _grouped_fp8_kernel(
    a_ptr,  # [M, K] e4m3, its bytes where DECODE
    a_scale_ptr,  # [K/BLOCK, M] f32
    b_ptr,  # along "m" [E, N, K], else [N, K]
    b_scale_ptr,  # [.., K/BLOCK, N] f32, or [.., N/BLOCK, K/BLOCK] where B_SQUARE
    ends_ptr,  # [E] int32
    out_ptr,  # along "m" [M, N], else [E, M, N]
    M,
    N,
    K,
    groups,
    ALONG_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
    E_PAD: tl.constexpr,
):
    group, first_m, end_m, first_n, first_block, end_block = _locate(
        ends_ptr, M, N, K, groups, ALONG_M, BLOCK, TILE_M, TILE_N, GROUP, E_PAD
    )
    if first_m >= end_m:
        return
    if ACCUMULATE and first_block >= end_block:
        return
    offs_m, offs_n = tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N)
    a_ptr += tl.cast(first_m, tl.int64) * K
    a_scale_ptr += first_m
    out_ptr += tl.cast(first_m, tl.int64) * N
    if ALONG_M:
        # Of no group: outside of b, and an empty loop reads nothing of it.
        b_ptr += group.to(tl.int64) * N * K
        scales_n = tl.cdiv(N, BLOCK) if B_SQUARE else N
        b_scale_ptr += group.to(tl.int64) * scales_n * tl.cdiv(K, BLOCK)
    else:
        out_ptr += group.to(tl.int64) * M * N
    acc = accumulate_fp8(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, first_n, end_m - first_m,
        first_block * BLOCK, end_block * BLOCK, M, N, K, B_SQUARE, DECODE, BLOCK, TILE_M, TILE_N,
    )  # fmt: skip
    store_output(out_ptr, None, acc, offs_m, offs_n, end_m - first_m, N, ACCUMULATE)


@triton.jit(do_not_specialize=["M", "grid_k"])
def _grouped_nvfp4_kernel(
    a_ptr,  # [M, ⌈K/2⌉] two codes a byte
    a_scale_ptr,  # [M, K/BLOCK] e4m3 bytes
    a_global_ptr,  # f32 scalar; A_PER_GROUP [E]
    b_ptr,  # along "m" [E, N, ⌈K/2⌉], else [N, ⌈K/2⌉]
    b_scale_ptr,  # [.., N/B_BLOCK_ROWS, K/BLOCK] e4m3 bytes
    b_global_ptr,  # f32 scalar; B_PER_GROUP [E]
    ends_ptr,  # [E] int32
    out_ptr,  # along "m" [M, N], else [E, M, N]
    M,
    N,
    packed_k,  # bytes in a row of payload, and
    grid_k,  # scales in a row: the last bytes may be padding
    groups,
    ALONG_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    B_BLOCK_ROWS: tl.constexpr,
    A_PER_GROUP: tl.constexpr,
    B_PER_GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    E_PAD: tl.constexpr,
):
    group, first_m, end_m, first_n, first_block, end_block = _locate(
        ends_ptr, M, N, grid_k * BLOCK, groups, ALONG_M, BLOCK, TILE_M, TILE_N, GROUP, E_PAD
    )
    if first_m >= end_m:
        return
    if ACCUMULATE and first_block >= end_block:
        return
    offs_m, offs_n = tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N)
    a_ptr += tl.cast(first_m, tl.int64) * packed_k
    a_scale_ptr += tl.cast(first_m, tl.int64) * grid_k
    out_ptr += tl.cast(first_m, tl.int64) * N
    blocks_n = first_n // B_BLOCK_ROWS + tl.arange(0, TILE_N // B_BLOCK_ROWS)
    if ALONG_M:
        b_ptr += group.to(tl.int64) * N * packed_k
        b_scale_ptr += group.to(tl.int64) * tl.cdiv(N, B_BLOCK_ROWS) * grid_k
    else:
        out_ptr += group.to(tl.int64) * M * N
    acc = accumulate_nvfp4(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, offs_m, offs_n, blocks_n, end_m - first_m,
        first_block * (BLOCK // 2), end_block * (BLOCK // 2), end_block, N, packed_k, grid_k,
        DECODE, BLOCK, B_BLOCK_ROWS, TILE_M, TILE_N, TILE_K,
    )  # fmt: skip
    # Tokens of no group have no scale.
    scaled_by = tl.where(first_block < end_block, group, 0)
    if A_PER_GROUP:
        a_global_ptr += scaled_by
    if B_PER_GROUP:
        b_global_ptr += scaled_by
    # What nothing was summed to stays zero, with scales of NaN too.
    acc *= tl.where(first_block < end_block, tl.load(a_global_ptr) * tl.load(b_global_ptr), 0.0)
    store_output(out_ptr, None, acc, offs_m, offs_n, end_m - first_m, N, ACCUMULATE)


def grouped_matmul(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Arguments and result as in the op; `a` has one-row blocks, and along "k" so has `b`."""
    rows, columns = a.qdata.shape[0], b.qdata.shape[-2]
    shape = (rows, columns) if along == "m" else (groups.ends.shape[0], rows, columns)
    out = a.qdata.new_empty(shape, dtype=out_dtype)
    _launch(out, a, b, groups.ends, along == "m", accumulate=False)
    return out


def add_grouped_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups) -> None:
    """out [E, M, N] f32 += the product along "k"."""
    _launch(out, a, b, groups.ends, False, accumulate=True)


def _launch(out: torch.Tensor, a: Operand, b: Operand, ends: torch.Tensor, along_m: bool, accumulate: bool) -> None:
    if out.numel() == 0:
        return
    M, N, groups, a_fmt, b_fmt = a.qdata.shape[0], out.shape[-1], ends.shape[0], a.format, b.format
    qa, qb = aligned_rows(a.qdata), aligned_rows(b.qdata.flatten(0, -2))
    a_scale, b_scale = a.scale.contiguous(), b.scale.contiguous()
    # The host knows the mean of the groups' sizes, not the sizes. A tile that is taller than a group multiplies rows
    # that are not there: half its work for 64 tokens an expert in tiles of 128. A group of more than a tile reads its
    # matrix again, but from the L2 cache, where the tile beside it has left it.
    config = config_for(a_fmt, ceil_div(M, groups) if along_m else M, out.device)
    decode = decodes(a_fmt, out.device)
    if a_fmt.element is E2M1 and decode:
        config = config._replace(blocks_k=min(config.blocks_k, _BLOCKS_K))
    elif a_fmt.element is not E2M1 and not b_fmt.is_square and compute_capability(out.device) >= (10, 0):
        config = config._replace(tile_n=min(config.tile_n, _TILE_N))
    if along_m:
        # Tokens of no group begin a tile, too.
        rows_of_tiles = padded_tokens(M, groups + 1, config.tile_m) // config.tile_m
    else:
        rows_of_tiles = groups * ceil_div(M, config.tile_m)
    grid = rows_of_tiles * ceil_div(N, config.tile_n)
    tiles = {
        "ALONG_M": along_m,
        "ACCUMULATE": accumulate,
        "DECODE": decode,
        "BLOCK": a_fmt.block[1],
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "GROUP": GROUP,
        "E_PAD": triton.next_power_of_2(groups),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if a_fmt.element is E2M1:
        launch(
            _grouped_nvfp4_kernel, grid,
            qa, a_scale.view(torch.uint8), a.global_scale, qb, b_scale.view(torch.uint8), b.global_scale, ends, out,
            M, N, qa.shape[1], a_scale.shape[1], groups,
            B_BLOCK_ROWS=b_fmt.block[0], A_PER_GROUP=a.global_scale.dim() > 0, B_PER_GROUP=b.global_scale.dim() > 0,
            TILE_K=config.blocks_k * a_fmt.block[1], **tiles,
        )  # fmt: skip
    else:
        if decode:
            qa, qb = qa.view(torch.uint8), qb.view(torch.uint8)
        launch(
            _grouped_fp8_kernel, grid,
            qa, a_scale, qb, b_scale, ends, out, M, N, qa.shape[1], groups,
            B_SQUARE=b_fmt.is_square, **tiles,
        )  # fmt: skip
