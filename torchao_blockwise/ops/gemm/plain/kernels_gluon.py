"""NT products of FP8 operands on Hopper: a[M, K] @ b[N, K].T with scales a block of K, output rounded once.

Which build of the kernel in `gluon_pipeline.py` a product takes, and how its operands are handed to the copy engine.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.gemm.builds import STAGE_BYTES, WAVE_ROWS, Build, choose_build
from torchao_blockwise.ops.gemm.gluon_pipeline import MAX_CTAS, matmul_fp8_kernel
from torchao_blockwise.ops.gemm.gluon_ring import WARPGROUP
from torchao_blockwise.ops.gemm.rows import aligned_rows
from torchao_blockwise.ops.launch import Tile, ceil_div, launch
from torchao_blockwise.ops.padding import ROW_BYTES

# How tiles are dealt out to a pair of multiprocessors: one for both, or a half of its rows or columns to each.
_SHARED, _ROWS_HALVED, _COLUMNS_HALVED = [[0, 0]], [[1, 0]], [[0, 1]]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def matmul(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None, build: Build | None = None
) -> torch.Tensor:
    """[M, N] product of what the table admits. Arguments as in the op; build: the default is `choose_build`'s."""
    out = a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)
    _launch(out, a, b, bias, False, build)
    return out


def add_matmul(out: torch.Tensor, a: Operand, b: Operand, build: Build | None = None) -> None:
    """out [M, N] f32 += a @ b.T, in the one pass that the product takes."""
    _launch(out, a, b, None, True, build)


def _launch(
    out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, accumulate: bool, build: Build | None
) -> None:
    (M, N), K = out.shape, a.qdata.shape[1]
    available, block = multiprocessors(out.device), b.format.block[1]
    build = choose_build(M, N, K, block, available, MAX_CTAS) if build is None else build
    splits = build.splits
    build = replace(
        build,
        block=block,
        b_square=b.format.is_square,
        has_bias=bias is not None and splits == 1,
        accumulate=accumulate and splits == 1,
        copy_out=splits == 1 and not accumulate and copies_out(N, out.dtype),
    )
    tiles = tiles_of(build)
    programs = ceil_div(M, build.tile_m) * ceil_div(N, build.width) * splits
    target = out.new_empty((splits, M, N), dtype=torch.float32) if splits > 1 else out
    launch(
        matmul_fp8_kernel,
        min(programs, available // build.ctas),
        *in_tiles(aligned_rows(a.qdata), a.scale, aligned_rows(b.qdata), b.scale, tiles),
        bias.contiguous() if bias is not None and build.has_bias else out,
        target if tiles.out is None else (target, tiles.out),
        M,
        N,
        K,
        B=build,
        num_warps=WARPGROUP,
        num_ctas=build.ctas,
    )
    if splits > 1:
        product = target.sum(0)
        product = product if bias is None else product.add_(bias)
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)


class TilesOf(NamedTuple):
    """In what tiles the copy engine moves what a product takes; None for what it does not move."""

    a: Tile
    a_scale: Tile | None
    b: Tile
    b_scale: Tile | None
    out: Tile | None


def copies_out(columns: int, dtype: torch.dtype) -> bool:
    """Whether the copy engine can write an output of `columns` columns: it asks for rows of whole 16 bytes.

    Direct stores of fp32 fill whole sectors as it is.
    """
    return dtype.itemsize == 2 and columns * dtype.itemsize % ROW_BYTES == 0


@functools.cache
def tiles_of(build: Build) -> TilesOf:
    """The tiles in which a build's matrices are moved: payload, fp32 scales of blocks, and an output of 16 bits."""

    def tile(rows, columns, dealt, itemsize):
        # Rows of a tile that fill a swizzle are swizzled; rows of scales are read as they lie.
        swizzle = STAGE_BYTES if rows > 1 else 0
        halves = {"cga_layout": dealt} if build.ctas == 2 else {}
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=itemsize * 8, rank=2, **halves)
        return Tile((rows, columns), layout)

    return TilesOf(
        tile(build.copied_rows, build.depth, _SHARED, build.itemsize),
        None if build.decoded else tile(1, build.copied_rows, _SHARED, 4),
        tile(build.width, build.depth, _ROWS_HALVED, build.itemsize),
        None if build.decoded or build.b_square else tile(1, build.width, _COLUMNS_HALVED, 4),
        tile(WAVE_ROWS, build.width, _COLUMNS_HALVED, 2) if build.copy_out else None,
    )


def in_tiles(a, a_scale, b, b_scale, tiles: TilesOf) -> tuple:
    """What the kernels take for matrices a [M, K] and b [N, K] of aligned rows, and their scales."""
    a_scale = a_scale.contiguous() if tiles.a_scale is None else (aligned_rows(a_scale), tiles.a_scale)
    b_scale = b_scale.contiguous() if tiles.b_scale is None else (aligned_rows(b_scale), tiles.b_scale)
    return (a, tiles.a), a_scale, (b, tiles.b), b_scale
