"""RMSNorm and LayerNorm in Triton: the statistics of each row, then a pass that normalizes and quantizes tile by tile.

            K                        one pass over x for the statistics [M], which backward needs anyway;
      ┌───┬───┬───┐                  another that makes y in registers and stores its rowwise copy
    M │   │ y │   │  tile [ROWS, 128]

A columnwise block needs 128 rows and a row's statistics all of K, so no tile could do both. Columnwise copies are made
by kernels_gluon.py where the GPU and the dtypes allow it; elsewhere y is stored, and quantized by a launch of its own.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies
from torchao_blockwise.ops.device.elements import from_f32, to_f32
from torchao_blockwise.ops.device.tiles import load_tile, options_of, store_rowwise, store_tile
from torchao_blockwise.ops.fused.norm.values import Norm
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import new_copies, pointers
from torchao_blockwise.ops.quantization.kernels_triton import quantize

# Of a program of the statistics: columns that it has room for at a time, elements that fill it, of several rows, warps.
_MOST_COLUMNS, _ELEMENTS, _WARPS = 8192, 4096, 4
# Columns of a longer row that are read at a time, and how many rows.
_COLUMNS, _ROWS = 512, 4

_TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _row_mean(total, K):
    return tl.div_rn(total, tl.zeros_like(total) + K)


@triton.jit
def _rstd(squares, K, EPS: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(_row_mean(squares, K) + EPS))


@triton.jit
def _statistics_kernel(
    x_ptr,  # [M, K] bf16 | f16 | f32
    mean_ptr,  # [M] f32, or None for RMSNorm
    rstd_ptr,  # [M] f32
    M,
    K,
    stride_xm,
    stride_xk,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,  # COLUMNS is no less than K: one reading is enough
):
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    if WHOLE_ROWS:
        offs_k = tl.arange(0, COLUMNS)
        row = load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk)
        if mean_ptr is not None:
            mean = _row_mean(tl.sum(row, 1), K)
            tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
            row = tl.where((offs_k < K)[None, :], row - mean[:, None], 0.0)
        tl.store(rstd_ptr + offs_m, _rstd(tl.sum(row * row, 1), K, EPS), mask=offs_m < M)
        return
    if mean_ptr is not None:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, COLUMNS):
            total += load_tile(x_ptr, offs_m, start + tl.arange(0, COLUMNS), M, K, stride_xm, stride_xk)
        mean = _row_mean(tl.sum(total, 1), K)
        tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
    # The second reading of a row comes from cache.
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        offs_k = start + tl.arange(0, COLUMNS)
        x = load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk)
        x = tl.where((offs_k < K)[None, :], x - mean[:, None], 0.0)
        total += x * x
    tl.store(rstd_ptr + offs_m, _rstd(tl.sum(total, 1), K, EPS), mask=offs_m < M)


def statistics(x: torch.Tensor, layer: bool, eps: float) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(mean or None, rstd), fp32 [M], of the rows of `x` [M, K]."""
    M, K = x.shape
    rstd = x.new_empty(M, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    if M > 0:
        columns = max(triton.next_power_of_2(K), _COLUMNS)
        whole = columns <= _MOST_COLUMNS
        rows, columns = (max(_ELEMENTS // columns, 1), columns) if whole else (_ROWS, _COLUMNS)
        launch(
            _statistics_kernel, ceil_div(M, rows), x, mean, rstd, M, K, *x.stride(),
            EPS=eps, ROWS=rows, COLUMNS=columns, WHOLE_ROWS=whole, num_warps=_WARPS,
        )  # fmt: skip
    return mean, rstd


@triton.jit
def _norm_quantize_kernel(
    x_ptr,  # [M, K] bf16 | f16 | f32
    mean_ptr,  # [M] f32, or None
    rstd_ptr,  # [M] f32
    weight_ptr,  # [K], or None
    bias_ptr,  # [K], or None
    y_ptr,  # [M, K] of DTYPE: written where no copy is asked for
    q_ptr,
    s_ptr,
    M,
    K,
    stride_xm,
    stride_xk,
    DTYPE: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BLOCK)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    offs_k = tile_k * BLOCK + tl.arange(0, BLOCK)
    columns = offs_k < K
    if weight_ptr is not None:
        weight = to_f32(tl.load(weight_ptr + offs_k, mask=columns, other=0.0))
    if bias_ptr is not None:
        bias = to_f32(tl.load(bias_ptr + offs_k, mask=columns, other=0.0))
    offs_m = tile_m * ROWS + tl.arange(0, ROWS)
    rows = offs_m < M
    y = load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk)
    if mean_ptr is not None:
        y -= tl.load(mean_ptr + offs_m, mask=rows, other=0.0)[:, None]
    y *= tl.load(rstd_ptr + offs_m, mask=rows, other=0.0)[:, None]
    if weight_ptr is not None:
        y *= weight[None, :]
    if bias_ptr is not None:
        y += bias[None, :]
    # A bias, or a row of NaN, would reach blocks from beside the matrix.
    y = from_f32(tl.where(rows[:, None] & columns[None, :], y, 0.0), DTYPE)
    if ROWWISE:
        store_rowwise(to_f32(y), q_ptr, s_ptr, tile_k, offs_m, offs_k, M, K, ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    else:
        store_tile(y_ptr, y, offs_m, offs_k, M, K)


def _launch(norm: Norm, outputs: tuple, options: CastOptions | None) -> None:
    """Store the rowwise copy (None, q, s) that these options ask for, or y itself (y, None, None)."""
    x, (M, K) = norm.x, norm.x.shape
    if x.numel() == 0:
        return
    vectors = (None if t is None else t.contiguous() for t in (norm.mean, norm.rstd, norm.weight, norm.bias))
    constants = options_of(FP8_1X128, options is not None, options is not None and options.power_of_2_scales)
    tiles = ceil_div(M, constants["ROWS"]) * ceil_div(K, constants["BLOCK"])
    launch(
        _norm_quantize_kernel, tiles, x, *vectors, *outputs, M, K, *x.stride(),
        DTYPE=_TL_DTYPES[norm.dtype], **constants,
    )  # fmt: skip


def norm_quantize(norm: Norm, options: CastOptions) -> Copies:
    """Arguments and result as in the op, bit for bit."""
    if options.columnwise:
        return quantize(normalize(norm), None, options)
    copies = new_copies(norm.x, norm.x.shape, options)
    _launch(norm, (None, *pointers(copies)[:2]), options)
    return copies


def normalize(norm: Norm) -> torch.Tensor:
    """y itself, [M, K]: what `norm_quantize` quantizes, by the same kernel."""
    y = norm.x.new_empty(norm.x.shape, dtype=norm.dtype)
    _launch(norm, (y, None, None), None)
    return y
