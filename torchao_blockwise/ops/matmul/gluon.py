"""NT products of FP8 operands on Hopper: a[M, K] @ b[N, K].T with scales a block of K, output rounded once.

Which build of the kernel in `gluon_pipeline.py` a product takes, and how its operands are handed to the copy engine.
"""

import functools
from dataclasses import replace

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, BlockFormat
from torchao_blockwise.ops.backend import interpreting
from torchao_blockwise.ops.launch import ceil_div
from torchao_blockwise.ops.matmul.builds import WAVE_ROWS, Build, choose_build
from torchao_blockwise.ops.matmul.gluon_pipeline import MAX_CTAS, WARPGROUP, matmul_fp8_kernel
from torchao_blockwise.ops.matmul.rows import ROW_BYTES, aligned_rows

# Bytes of the widest swizzle, which is also a block of K.
_SWIZZLE = 128
# How tiles are dealt out to a pair of multiprocessors: one for both, or a half of its rows or columns to each.
SHARED, ROWS_HALVED, COLUMNS_HALVED = [[0, 0]], [[1, 0]], [[0, 1]]


def why_not(a, b, a_fmt: BlockFormat, b_fmt: BlockFormat) -> str | None:
    """Why these kernels cannot compute this product on a Hopper GPU, or None if they can."""
    if interpreting():
        return "Triton's interpreter does not know Gluon"
    if a_fmt is not FP8_1X128 or b_fmt not in (FP8_1X128, FP8_128X128):
        return f"the kernels multiply fp8_1x128 by fp8_128x128 or fp8_1x128, got {a_fmt.name} · {b_fmt.name}"
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if 0 in (m, n, k):
        return f"the copy engine has no empty tensors, got M={m}, N={n}, K={k}"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    build: Build | None = None,
) -> torch.Tensor:
    """[M, N] product, within what `why_not` admits. Arguments as in the op; build: the default is `choose_build`'s."""
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    return _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, bias, False, build)


def add_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    build: Build | None = None,
) -> torch.Tensor:
    """out [M, N] f32 += a @ b.T, in the one pass that the product takes."""
    return _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, None, True, build)


def _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, bias, accumulate, build):
    M, N = out.shape
    block = a_fmt.block[1]
    a, b = aligned_rows(a), aligned_rows(b)
    K = a.shape[1]
    available = multiprocessors(a.device)
    build = choose_build(M, N, K, block, available, MAX_CTAS) if build is None else build
    split = build.splits > 1
    target = out.new_empty((build.splits, M, N), dtype=torch.float32) if split else out
    build = replace(
        build,
        block=block,
        b_square=b_fmt.is_square,
        has_bias=bias is not None and not split,
        accumulate=accumulate and not split,
        copy_out=not (split or accumulate) and copies_out(out),
    )
    arguments = (
        *describe_operands(a, a_scale, b, b_scale, build),
        bias.contiguous() if build.has_bias else out,
        describe(target, WAVE_ROWS, build.width, COLUMNS_HALVED, build) if build.copy_out else target,
        M,
        N,
        K,
    )
    tiles = ceil_div(M, build.tile_m) * ceil_div(N, build.width) * build.splits
    grid = (min(tiles, available // build.ctas),)
    with torch.cuda.device_of(a):
        matmul_fp8_kernel[grid](*arguments, B=build, num_warps=WARPGROUP, num_ctas=build.ctas)
    if split:
        product = target.sum(0)
        product = product if bias is None else product.add_(bias)
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)
    return out


def copies_out(out: torch.Tensor) -> bool:
    """Whether the copy engine can write `out`: it asks for rows of whole 16 bytes.

    Direct stores of fp32 fill whole sectors as it is.
    """
    return out.itemsize == 2 and out.shape[-1] * out.itemsize % ROW_BYTES == 0


def describe_operands(a, a_scale, b, b_scale, build: Build) -> tuple:
    """What the kernels take for matrices a [M, K] and b [N, K] of aligned rows, and their scales."""
    if build.b_square:
        b_scale = b_scale.contiguous()
    else:
        b_scale = describe(aligned_rows(b_scale), 1, build.width, COLUMNS_HALVED, build)
    return (
        describe(a, WAVE_ROWS, build.block, SHARED, build),
        describe(aligned_rows(a_scale), 1, WAVE_ROWS, SHARED, build),
        describe(b, build.width, build.block, ROWS_HALVED, build),
        b_scale,
    )


def describe(x: torch.Tensor, rows: int, columns: int, dealt: list, build: Build) -> TensorDescriptor:
    """What the copy engine needs to know to copy tiles of [rows, columns] of the matrix `x`."""
    # Rows of a tile that fill a swizzle are swizzled; rows of scales are read as they lie.
    swizzle = _SWIZZLE if rows > 1 else 0
    halves = {"cga_layout": dealt} if build.ctas == 2 else {}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=x.itemsize * 8, rank=2, **halves)
    # The stride of a lone row may be anything.
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, columns], layout)
