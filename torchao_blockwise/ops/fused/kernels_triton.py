"""Norms, SwiGLU and its gradients in Triton, quantized in the pass that computes them.

Norms: one pass over x computes the statistics [M], which backward needs anyway; another one computes y in registers and
stores its rowwise copy, tile by tile. A columnwise block needs 128 rows, and the statistics of a row need all of K, so
no tile could do both.

SwiGLU, h = silu(gate) · up: a program computes a tile from the same tile of both. The gradients are stored next to each
other: neighboring programs compute a (of the gate) and b (of up), because they read the same tiles of gate, up and dh:

                 H                              2H
           ┌───┬───┬───┐              ┌───┬───┬───┬───┬───┬───┐
    gate M │   │ g │   │              │   │ a │   │   │ b │   │
           └───┴───┴───┘   backward → └───┴───┴───┴───┴───┴───┘
    up   M │   │ u │   │
           └───┴───┴───┘

If H is not a multiple of a block, one block of the gradient contains parts of both, and its program reads tiles of
both.

kernels_gluon.py computes columnwise copies, if the GPU and the dtypes allow it. Otherwise, the result is stored, and
quantized in another launch. Groups of tokens: tiles do not depend on groups; rows after the last group are zeros.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies, Groups
from torchao_blockwise.ops.device.elements import DTYPES, from_f32, reciprocal, to_f32
from torchao_blockwise.ops.device.groups import locate_rows
from torchao_blockwise.ops.device.tiles import load_tile, options_of, store_rowwise, store_tile
from torchao_blockwise.ops.fused import Norm, exponential
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import new_copies, pointers
from torchao_blockwise.ops.quantization.kernels_triton import quantize

# A program that computes statistics: the largest number of columns at a time, elements of all its rows, warps.
_MOST_COLUMNS, _ELEMENTS, _WARPS = 8192, 4096, 4
# Columns of a longer row that are read at a time, and how many rows.
_COLUMNS, _ROWS = 512, 4


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
    WHOLE_ROWS: tl.constexpr,  # K is at most COLUMNS, so one read is enough
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
    # The second read of a row comes from cache.
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        offs_k = start + tl.arange(0, COLUMNS)
        x = load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk)
        x = tl.where((offs_k < K)[None, :], x - mean[:, None], 0.0)
        total += x * x
    tl.store(rstd_ptr + offs_m, _rstd(tl.sum(total, 1), K, EPS), mask=offs_m < M)


def norm_statistics(x: torch.Tensor, layer: bool, eps: float) -> tuple[torch.Tensor | None, torch.Tensor]:
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
    y_ptr,  # [M, K] of DTYPE, written if no copy is requested
    q_ptr,
    s_ptr,
    M,
    K,
    stride_xm,
    stride_xk,
    DTYPE: tl.constexpr,
    B: tl.constexpr,  # a Build
):
    tiles_k = tl.cdiv(K, B.block)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    offs_k = tile_k * B.block + tl.arange(0, B.block)
    columns = offs_k < K
    if weight_ptr is not None:
        weight = to_f32(tl.load(weight_ptr + offs_k, mask=columns, other=0.0))
    if bias_ptr is not None:
        bias = to_f32(tl.load(bias_ptr + offs_k, mask=columns, other=0.0))
    offs_m = tile_m * B.rows + tl.arange(0, B.rows)
    rows = offs_m < M
    y = load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk)
    if mean_ptr is not None:
        y -= tl.load(mean_ptr + offs_m, mask=rows, other=0.0)[:, None]
    y *= tl.load(rstd_ptr + offs_m, mask=rows, other=0.0)[:, None]
    if weight_ptr is not None:
        y *= weight[None, :]
    if bias_ptr is not None:
        y += bias[None, :]
    # Otherwise, a bias or NaN would affect blocks from outside the matrix.
    y = from_f32(tl.where(rows[:, None] & columns[None, :], y, 0.0), DTYPE)
    if B.rowwise:
        store_rowwise(to_f32(y), q_ptr, s_ptr, tile_k, offs_m, offs_k, M, K, B)
    else:
        store_tile(y_ptr, y, offs_m, offs_k, M, K)


_LOW, _HIGH, _LEAST = (tl.constexpr(x) for x in (exponential.LOW, exponential.HIGH, exponential.LEAST))
_LOG2_E, _SHIFT = tl.constexpr(exponential.LOG2_E), tl.constexpr(exponential.SHIFT)
_C5, _C4, _C3, _C2, _C1 = (tl.constexpr(coefficient) for coefficient in exponential.POLYNOMIAL)
_MANTISSA_BITS = tl.constexpr(exponential.MANTISSA_BITS)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x); see exponential.py. It drops NaN, but all callers multiply the result by `x`."""
    t = tl.maximum(tl.minimum(-x, _HIGH), _LOW) * _LOG2_E
    shifted = t + _SHIFT
    f = t - (shifted - _SHIFT)
    p = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + 1.0
    # The low bits of `shifted` are n; the shift removes all others.
    exponent = shifted.to(tl.int32, bitcast=True) << _MANTISSA_BITS
    return reciprocal(1.0 + (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)) - _LEAST


@triton.jit
def silu_times(gate, up):
    """silu(gate) · up."""
    return gate * _sigmoid(gate) * up


@triton.jit
def swiglu_gradients(dh, gate, up):
    """(dgate, dup)."""
    s = _sigmoid(gate)
    return dh * up * (s * (1.0 + gate * (1.0 - s))), dh * (gate * s)


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [M, H] bf16 | f16 | f32
    up_ptr,  # [M, H] of the same dtype
    h_ptr,  # [M, H] of the same dtype, written if no copy is requested
    q_ptr,
    s_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see device/groups.py
    M,
    H,
    stride_gm,
    stride_gh,
    stride_um,
    stride_uh,
    B: tl.constexpr,  # a Build
):
    tiles_h = tl.cdiv(H, B.block)
    tile_m, tile_h = tl.program_id(0) // tiles_h, tl.program_id(0) % tiles_h
    offs_h = tile_h * B.block + tl.arange(0, B.block)
    first, live, end = locate_rows(blocks_ptr, tile_m, M, B.rows, False)
    offs_m = first + tl.arange(0, B.rows)
    gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
    up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
    h = from_f32(silu_times(gate, up), gate_ptr.dtype.element_ty)
    if B.rowwise:
        store_rowwise(to_f32(h), q_ptr, s_ptr, tile_h, offs_m, offs_h, M, H, B, end)
    else:
        store_tile(h_ptr, h, offs_m, offs_h, M, H)


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,  # [M, H] bf16 | f16 | f32
    gate_ptr,  # [M, H]
    up_ptr,  # [M, H]
    dgate_ptr,  # [M, H] of the dtype of gate, written if no copy is requested
    dup_ptr,  # the same
    q_ptr,  # the copy is of the [M, 2H] gradient (dgate | dup)
    s_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see device/groups.py
    M,
    H,
    stride_dm,
    stride_dh,
    stride_gm,
    stride_gh,
    stride_um,
    stride_uh,
    WHOLE_BLOCKS: tl.constexpr,  # H is a multiple of a block: no block of the gradient holds parts of both
    B: tl.constexpr,  # a Build
):
    SPLIT: tl.constexpr = B.rowwise and not WHOLE_BLOCKS
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    if SPLIT:
        tiles_c = tl.cdiv(2 * H, B.block)
        tile_m, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
        offs_c = tile_c * B.block + tl.arange(0, B.block)
        # Columns of the gradient from H on are those of `up`.
        of_up = ((offs_c >= H) & (offs_c < 2 * H))[None, :]
        offs_h = tl.where((offs_c >= H) & (offs_c < 2 * H), offs_c - H, offs_c)
    else:
        # Programs that read the same tiles are neighbors, so that the second read comes from cache.
        PARTS: tl.constexpr = 2 if B.rowwise else 1
        tiles_h = tl.cdiv(H, B.block)
        part = tl.program_id(0) % PARTS
        tile_h = tl.program_id(0) // PARTS % tiles_h
        tile_m = tl.program_id(0) // PARTS // tiles_h
        tile_c = tile_h + part * tiles_h
        offs_h = tile_h * B.block + tl.arange(0, B.block)
        offs_c = tile_c * B.block + tl.arange(0, B.block)
        of_up = part == 1
    first, live, end = locate_rows(blocks_ptr, tile_m, M, B.rows, False)
    offs_m = first + tl.arange(0, B.rows)
    dh = load_tile(dh_ptr, offs_m, offs_h, live, H, stride_dm, stride_dh)
    gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
    up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
    dgate, dup = swiglu_gradients(dh, gate, up)
    if B.rowwise:
        gradient = to_f32(from_f32(tl.where(of_up, dup, dgate), dtype))
        store_rowwise(gradient, q_ptr, s_ptr, tile_c, offs_m, offs_c, M, 2 * H, B, end)
    else:
        store_tile(dgate_ptr, from_f32(dgate, dtype), offs_m, offs_h, M, H)
        store_tile(dup_ptr, from_f32(dup, dtype), offs_m, offs_h, M, H)


# --- launchers --------------------------------------------------------------------------------------------------------


def _launch(kernel, inputs, arguments, rowwise: bool, power_of_2_scales=False, width=0, **flags) -> None:
    """Run `kernel` on `inputs` [M, K]. arguments: those after the inputs. width: columns of the result, 0 for K."""
    M, K = inputs[0].shape
    if M == 0 or K == 0:
        return
    options = options_of(FP8_1X128, rowwise, power_of_2_scales)
    tiles = ceil_div(M, options["B"].rows) * ceil_div(width or K, options["B"].block)
    strides = [stride for x in inputs for stride in x.stride()]
    launch(kernel, tiles, *inputs, *arguments, M, K, *strides, **flags, **options)


def _launch_norm(norm: Norm, outputs, rowwise: bool, power_of_2_scales=False) -> None:
    vectors = (None if t is None else t.contiguous() for t in (norm.mean, norm.rstd, norm.weight, norm.bias))
    dtype = DTYPES[norm.dtype]
    _launch(_norm_quantize_kernel, [norm.x], [*vectors, *outputs], rowwise, power_of_2_scales, DTYPE=dtype)


def norm_quantize(norm: Norm, options: CastOptions) -> Copies:
    """Arguments and result as in the op, bit for bit."""
    if options.columnwise:
        return quantize(normalize(norm), None, options)
    copies = new_copies(norm.x, norm.x.shape, options)
    _launch_norm(norm, [None, *pointers(copies)[:2]], True, options.power_of_2_scales)
    return copies


def normalize(norm: Norm) -> torch.Tensor:
    """Return y, [M, K], which `norm_quantize` quantizes, with the same kernel."""
    y = norm.x.new_empty(norm.x.shape, dtype=norm.dtype)
    _launch_norm(norm, [y, None, None], False)
    return y


def _quantize(
    kernel, inputs, width: int, plain: Callable[[], torch.Tensor], options: CastOptions, groups: Groups | None, **flags
) -> Copies:
    """Return the requested copies of the matrix [M, width] that `kernel` computes. plain: computes the matrix."""
    if options.columnwise:
        return quantize(plain(), None, options, groups)
    tokens = inputs[0].shape[0]
    copies = new_copies(inputs[0], (tokens, width), options, groups)
    if inputs[0].numel() > 0:
        blocks = None if groups is None else block_table(groups, tokens, options.fmt)
        outputs = [None] * (len(inputs) - 1) + pointers(copies)[:2]
        _launch(kernel, inputs, [*outputs, blocks], True, options.power_of_2_scales, width, **flags)
    return copies


def swiglu_quantize(gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None) -> Copies:
    """Return copies of silu(gate) · up, with these groups."""
    return _quantize(_swiglu_kernel, (gate, up), gate.shape[1], lambda: swiglu(gate, up), options, groups)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up [M, H], which `swiglu_quantize` quantizes, with the same kernel."""
    h = gate.new_empty(gate.shape)
    _launch(_swiglu_kernel, (gate, up), (h, None, None, None), False)
    return h


def swiglu_backward_quantize(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None
) -> Copies:
    """Return copies of the [M, 2H] gradient (dgate | dup), with these groups."""
    H = gate.shape[1]
    return _quantize(
        _swiglu_backward_kernel, (dh, gate, up), 2 * H, lambda: torch.cat(swiglu_backward(dh, gate, up), 1),
        options, groups, WHOLE_BLOCKS=H % options.fmt.block[1] == 0,
    )  # fmt: skip


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dgate, dup) [M, H], which `swiglu_backward_quantize` quantizes, with the same kernel."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    # Programs that quantize compute one of the two gradients, and programs that store plain values compute both.
    _launch(_swiglu_backward_kernel, (dh, gate, up), (dgate, dup, None, None, None), False, WHOLE_BLOCKS=False)
    return dgate, dup
