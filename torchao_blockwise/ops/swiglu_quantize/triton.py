"""SwiGLU and its gradients in Triton, quantised in the pass that computes them.

Forward, h = silu(gate) · up, a program takes a tile of both. The gradients lie side by side: a (of the gate) and b (of
up) are computed by a program each, neighbours, as they read the same tiles of gate, up and dh:

                 H                              2H
           ┌───┬───┬───┐              ┌───┬───┬───┬───┬───┬───┐
    gate M │   │ g │   │              │   │ a │   │   │ b │   │
           └───┴───┴───┘   backward → └───┴───┴───┴───┴───┴───┘
    up   M │   │ u │   │
           └───┴───┴───┘

Where H is no multiple of a block, a block of the gradient holds parts of both, and a program reads what it needs.

Tokens in groups: tiles with a columnwise copy are blocks of the padded tokens, which begin at any row; behind those of
the last group come the tokens of no group, whose rowwise copy is zeros. Without one, tiles are rows as they lie.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import FP8_1X128, BlockFormat
from torchao_blockwise.ops.group_tables.triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.quantize.triton import why_not_gluon
from torchao_blockwise.ops.swiglu_quantize import activation
from torchao_blockwise.ops.triton_elements import from_f32, magnitude_bits, to_f32
from torchao_blockwise.ops.triton_group_blocks import locate_rows
from torchao_blockwise.ops.triton_tiles import (
    columnwise_needs_rowwise,
    load_tile,
    options_of,
    pointers,
    store_columnwise,
    store_plain,
    store_rowwise,
    width_of_rows,
)

# (parts of a tile, warps) of a program that makes a columnwise copy in Gluon, of SwiGLU and of its gradients; measured
# on an H200.
_GLUON, _GLUON_BACKWARD = (2, 4), (2, 16)


@triton.jit
def _columnwise_rows(blocks_ptr, tile_m, width_qt, columns, TILE_M: tl.constexpr):
    """Rows of the columnwise copy, 0 for a tile that it has no room for: of tokens of no group."""
    if blocks_ptr is None:
        return columns
    else:
        return tl.where(tile_m * TILE_M < width_qt, columns, 0)


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [M, H] bf16 | f16 | f32
    up_ptr,  # [M, H] of the same dtype
    h_ptr,  # [M, H] of the same dtype: written where no copy is asked for
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see triton_group_blocks.py
    M,
    H,
    width_qt,  # bytes of a row of qt, M and padding, or None
    stride_gm,
    stride_gh,
    stride_um,
    stride_uh,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles_h = tl.cdiv(H, BLOCK)
    tile_m, tile_h = tl.program_id(0) // tiles_h, tl.program_id(0) % tiles_h
    offs_h = tile_h * BLOCK + tl.arange(0, BLOCK)
    first, live, end = locate_rows(blocks_ptr, tile_m, M, TILE_M, COLUMNWISE)
    hs = ()
    largest = tl.zeros((ROWS, BLOCK), tl.int32)
    for i in tl.static_range(TILE_M // ROWS):
        offs_m = first + i * ROWS + tl.arange(0, ROWS)
        gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
        up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
        h = from_f32(activation.swiglu(gate, up), gate_ptr.dtype.element_ty)
        if ROWWISE:
            store_rowwise(
                to_f32(h), q_ptr, s_ptr, tile_h, offs_m, offs_h, M, H, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, end
            )  # fmt: skip
        if COLUMNWISE:
            largest = tl.maximum(largest, magnitude_bits(to_f32(h)))
            hs = hs + (h,)  # noqa: RUF005  # Triton knows no unpacking
        if not (ROWWISE or COLUMNWISE):
            store_plain(h_ptr, h, offs_m, offs_h, M, H)
    if COLUMNWISE:
        columns = _columnwise_rows(blocks_ptr, tile_m, width_qt, H, TILE_M)
        store_columnwise(
            hs, largest, qt_ptr, st_ptr, tile_m, offs_h, width_qt, columns, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, BLOCK
        )  # fmt: skip


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,  # [M, H] bf16 | f16 | f32
    gate_ptr,  # [M, H]
    up_ptr,  # [M, H]
    dgate_ptr,  # [M, H] of the dtype of gate: written where no copy is asked for
    dup_ptr,  # [M, H], likewise
    q_ptr,  # copies are of the [M, 2H] gradient (dgate | dup)
    s_ptr,
    qt_ptr,
    st_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see triton_group_blocks.py
    M,
    H,
    width_qt,  # bytes of a row of qt, M and padding, or None
    stride_dm,
    stride_dh,
    stride_gm,
    stride_gh,
    stride_um,
    stride_uh,
    WHOLE_BLOCKS: tl.constexpr,  # H is a multiple of BLOCK: no block of the gradient holds parts of both
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    QUANTIZE: tl.constexpr = ROWWISE or COLUMNWISE
    SPLIT: tl.constexpr = QUANTIZE and not WHOLE_BLOCKS
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    if SPLIT:
        tiles_c = tl.cdiv(2 * H, BLOCK)
        tile_m, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
        offs_c = tile_c * BLOCK + tl.arange(0, BLOCK)
        # Columns of the gradient from H on are those of `up`.
        of_up = ((offs_c >= H) & (offs_c < 2 * H))[None, :]
        offs_h = tl.where((offs_c >= H) & (offs_c < 2 * H), offs_c - H, offs_c)
    else:
        # Programs that read the same tiles are neighbours, so that the second reading comes from cache.
        PARTS: tl.constexpr = 2 if QUANTIZE else 1
        tiles_h = tl.cdiv(H, BLOCK)
        part = tl.program_id(0) % PARTS
        tile_h = tl.program_id(0) // PARTS % tiles_h
        tile_m = tl.program_id(0) // PARTS // tiles_h
        tile_c = tile_h + part * tiles_h
        offs_h = tile_h * BLOCK + tl.arange(0, BLOCK)
        offs_c = tile_c * BLOCK + tl.arange(0, BLOCK)
        of_up = part == 1
    first, live, end = locate_rows(blocks_ptr, tile_m, M, TILE_M, COLUMNWISE)
    gradients = ()
    largest = tl.zeros((ROWS, BLOCK), tl.int32)
    for i in tl.static_range(TILE_M // ROWS):
        offs_m = first + i * ROWS + tl.arange(0, ROWS)
        dh = load_tile(dh_ptr, offs_m, offs_h, live, H, stride_dm, stride_dh)
        gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
        up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
        dgate, dup = activation.swiglu_gradients(dh, gate, up)
        gradient = from_f32(tl.where(of_up, dup, dgate), dtype)
        if ROWWISE:
            store_rowwise(
                to_f32(gradient), q_ptr, s_ptr, tile_c, offs_m, offs_c, M, 2 * H, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, end
            )  # fmt: skip
        if COLUMNWISE:
            largest = tl.maximum(largest, magnitude_bits(to_f32(gradient)))
            gradients = gradients + (gradient,)  # noqa: RUF005  # Triton knows no unpacking
        if not QUANTIZE:
            store_plain(dgate_ptr, from_f32(dgate, dtype), offs_m, offs_h, M, H)
            store_plain(dup_ptr, from_f32(dup, dtype), offs_m, offs_h, M, H)
    if COLUMNWISE:
        columns = _columnwise_rows(blocks_ptr, tile_m, width_qt, 2 * H, TILE_M)
        store_columnwise(
            gradients, largest, qt_ptr, st_ptr, tile_m, offs_c, width_qt, columns,
            ELEMENT_MAX, MIN_AMAX, POWER_OF_2, BLOCK,
        )  # fmt: skip


def _launch(
    kernel, inputs, plain, fmt, copies, rowwise, columnwise, power_of_2_scales, width,
    group_ends=None, group_tables=None, **flags,
) -> None:  # fmt: skip
    """Run `kernel` on `inputs` [M, H]; its copies are of an [M, width]."""
    M, H = inputs[0].shape
    if M == 0 or H == 0:
        return
    blocks = None if group_ends is None else block_table(group_ends, M, fmt.block[1], group_tables)
    if columnwise and why_not_gluon(fmt, *inputs) is None:
        from torchao_blockwise.ops.swiglu_quantize import gluon

        options = _GLUON if len(inputs) == 2 else _GLUON_BACKWARD
        return gluon.launch(inputs, fmt, [None] * (4 - len(copies)) + copies, power_of_2_scales, *options, blocks)
    # Of gradients too: three inputs, two of them computed, leave no registers to read ahead.
    if columnwise and not rowwise and (columnwise_needs_rowwise(H) or len(inputs) > 2):
        copies, rowwise = [*fmt.new_empty(inputs[0], M, width), *copies], True
    options = options_of(fmt, rowwise, columnwise, power_of_2_scales)
    # Each group begins a tile where blocks are columns.
    in_blocks = columnwise and blocks is not None
    tiles_m = blocks.shape[0] - 1 if in_blocks else ceil_div(M, options["TILE_M"])
    tiles = tiles_m * ceil_div(width, options["BLOCK"])
    strides = [stride for x in inputs for stride in x.stride()]
    launch(
        kernel, tiles,
        *inputs, *plain, *pointers(copies, rowwise, columnwise), blocks, M, H, width_of_rows(copies, columnwise),
        *strides, **flags, **options,
    )  # fmt: skip


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat,
    copies: list[torch.Tensor],
    rowwise: bool,
    columnwise: bool,
    power_of_2_scales: bool,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
) -> None:
    """Fill `copies`, (qdata, scale) of each copy asked for, with silu(gate) · up quantised, in those groups."""
    width = gate.shape[1]
    _launch(
        _swiglu_kernel, (gate, up), (None,), fmt, copies, rowwise, columnwise, power_of_2_scales, width,
        group_ends, group_tables,
    )  # fmt: skip


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [M, H]: what `swiglu_quantize` quantises, by the same kernel."""
    h = gate.new_empty(gate.shape)
    _launch(_swiglu_kernel, (gate, up), (h,), FP8_1X128, [], False, False, False, gate.shape[1])
    return h


def swiglu_backward_quantize(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat,
    copies: list[torch.Tensor],
    rowwise: bool,
    columnwise: bool,
    power_of_2_scales: bool,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
) -> None:
    """Fill `copies` with the [M, 2H] gradient (dgate | dup) quantised, in those groups."""
    H = gate.shape[1]
    _launch(
        _swiglu_backward_kernel, (dh, gate, up), (None, None), fmt, copies, rowwise, columnwise, power_of_2_scales,
        2 * H, group_ends, group_tables, WHOLE_BLOCKS=H % fmt.block[1] == 0,
    )  # fmt: skip


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) [M, H]: what `swiglu_backward_quantize` quantises, by the same kernel."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _launch(
        _swiglu_backward_kernel, (dh, gate, up), (dgate, dup), FP8_1X128, [], False, False, False,
        gate.shape[1], WHOLE_BLOCKS=False,
    )  # fmt: skip
    return dgate, dup
