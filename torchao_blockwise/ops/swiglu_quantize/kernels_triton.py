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

Columnwise copies are made by kernels_gluon.py where the GPU and the dtypes allow it; elsewhere the result is stored,
and quantized by launches of its own.

Tokens in groups: tiles are rows as they lie; the rowwise copy of the tokens of no group is zeros.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import FP8_1X128, BlockFormat
from torchao_blockwise.ops.fused import new_copies
from torchao_blockwise.ops.group_tables.kernels_triton import block_table
from torchao_blockwise.ops.grouped_quantize.kernels_triton import quantize as grouped_quantize
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.quantize.kernels_triton import quantize, why_not_gluon
from torchao_blockwise.ops.swiglu_quantize import activation
from torchao_blockwise.ops.triton_elements import from_f32, to_f32
from torchao_blockwise.ops.triton_group_blocks import locate_rows
from torchao_blockwise.ops.triton_tiles import load_tile, options_of, store_plain, store_rowwise

# (parts of a tile, warps) of a program that makes a columnwise copy in Gluon, of SwiGLU and of its gradients; measured
# on an H200.
_GLUON, _GLUON_BACKWARD = (2, 4), (2, 16)


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [M, H] bf16 | f16 | f32
    up_ptr,  # [M, H] of the same dtype
    h_ptr,  # [M, H] of the same dtype: written where no copy is asked for
    q_ptr,
    s_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see triton_group_blocks.py
    M,
    H,
    stride_gm,
    stride_gh,
    stride_um,
    stride_uh,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles_h = tl.cdiv(H, BLOCK)
    tile_m, tile_h = tl.program_id(0) // tiles_h, tl.program_id(0) % tiles_h
    offs_h = tile_h * BLOCK + tl.arange(0, BLOCK)
    first, live, end = locate_rows(blocks_ptr, tile_m, M, ROWS, False)
    offs_m = first + tl.arange(0, ROWS)
    gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
    up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
    h = from_f32(activation.swiglu(gate, up), gate_ptr.dtype.element_ty)
    if ROWWISE:
        store_rowwise(to_f32(h), q_ptr, s_ptr, tile_h, offs_m, offs_h, M, H, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, end)
    else:
        store_plain(h_ptr, h, offs_m, offs_h, M, H)


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,  # [M, H] bf16 | f16 | f32
    gate_ptr,  # [M, H]
    up_ptr,  # [M, H]
    dgate_ptr,  # [M, H] of the dtype of gate: written where no copy is asked for
    dup_ptr,  # [M, H], likewise
    q_ptr,  # the copy is of the [M, 2H] gradient (dgate | dup)
    s_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see triton_group_blocks.py
    M,
    H,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SPLIT: tl.constexpr = ROWWISE and not WHOLE_BLOCKS
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
        PARTS: tl.constexpr = 2 if ROWWISE else 1
        tiles_h = tl.cdiv(H, BLOCK)
        part = tl.program_id(0) % PARTS
        tile_h = tl.program_id(0) // PARTS % tiles_h
        tile_m = tl.program_id(0) // PARTS // tiles_h
        tile_c = tile_h + part * tiles_h
        offs_h = tile_h * BLOCK + tl.arange(0, BLOCK)
        offs_c = tile_c * BLOCK + tl.arange(0, BLOCK)
        of_up = part == 1
    first, live, end = locate_rows(blocks_ptr, tile_m, M, ROWS, False)
    offs_m = first + tl.arange(0, ROWS)
    dh = load_tile(dh_ptr, offs_m, offs_h, live, H, stride_dm, stride_dh)
    gate = load_tile(gate_ptr, offs_m, offs_h, live, H, stride_gm, stride_gh)
    up = load_tile(up_ptr, offs_m, offs_h, live, H, stride_um, stride_uh)
    dgate, dup = activation.swiglu_gradients(dh, gate, up)
    if ROWWISE:
        gradient = to_f32(from_f32(tl.where(of_up, dup, dgate), dtype))
        store_rowwise(
            gradient, q_ptr, s_ptr, tile_c, offs_m, offs_c, M, 2 * H, ELEMENT_MAX, MIN_AMAX, POWER_OF_2, end
        )  # fmt: skip
    else:
        store_plain(dgate_ptr, from_f32(dgate, dtype), offs_m, offs_h, M, H)
        store_plain(dup_ptr, from_f32(dup, dtype), offs_m, offs_h, M, H)


def _launch(kernel, inputs, outputs, rowwise, power_of_2_scales=False, blocks=None, **flags) -> None:
    """Run `kernel` on `inputs` [M, H]. outputs: its pointers, None for what is not asked for, payload as bytes."""
    M, H = inputs[0].shape
    if M == 0 or H == 0:
        return
    options = options_of(FP8_1X128, rowwise, power_of_2_scales)
    # A program computes one of two gradients where it quantises, and both where it stores them as they are.
    width = 2 * H if rowwise and kernel is _swiglu_backward_kernel else H
    tiles = ceil_div(M, options["ROWS"]) * ceil_div(width, options["BLOCK"])
    strides = [stride for x in inputs for stride in x.stride()]
    launch(kernel, tiles, *inputs, *outputs, blocks, M, H, *strides, **flags, **options)


def _quantize(kernel, inputs, plain, fmt, width, build, options, group_ends, group_tables, **flags):
    """(qdata, scale) of each copy asked for of an [M, width], columnwise padded as in `quantize`, or as groups are.

    plain: makes that [M, width]. options: (rowwise, columnwise, power_of_2_scales).
    """
    rowwise, columnwise, power_of_2_scales = options
    x = inputs[0]
    in_gluon = columnwise and why_not_gluon(fmt, *inputs) is None
    if columnwise and not in_gluon:
        if group_ends is None:
            return [*quantize(plain(), fmt, None, *options)]
        return grouped_quantize(plain(), group_ends, fmt, None, *options, group_tables)
    copies = new_copies(x, fmt, (x.shape[0], width), rowwise, columnwise, group_ends)
    if x.numel() == 0:
        return copies
    blocks = None if group_ends is None else block_table(group_ends, x.shape[0], fmt.block[1], group_tables)
    if in_gluon:
        from torchao_blockwise.ops.swiglu_quantize import kernels_gluon as gluon

        gluon.launch(inputs, fmt, [None] * (4 - len(copies)) + copies, power_of_2_scales, *build, blocks)
    else:
        q, scale = copies
        outputs = [None] * (len(inputs) - 1) + [q.view(torch.uint8), scale]
        _launch(kernel, inputs, outputs, True, power_of_2_scales, blocks, **flags)
    return copies


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat,
    rowwise: bool,
    columnwise: bool,
    power_of_2_scales: bool,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Copies of silu(gate) · up, in those groups."""
    return _quantize(
        _swiglu_kernel, (gate, up), lambda: swiglu(gate, up), fmt, gate.shape[1], _GLUON,
        (rowwise, columnwise, power_of_2_scales), group_ends, group_tables,
    )  # fmt: skip


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [M, H]: what `swiglu_quantize` quantises, by the same kernel."""
    h = gate.new_empty(gate.shape)
    _launch(_swiglu_kernel, (gate, up), (h, None, None), False)
    return h


def swiglu_backward_quantize(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat,
    rowwise: bool,
    columnwise: bool,
    power_of_2_scales: bool,
    group_ends: torch.Tensor | None = None,
    group_tables: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Copies of the [M, 2H] gradient (dgate | dup), in those groups."""
    H = gate.shape[1]
    return _quantize(
        _swiglu_backward_kernel, (dh, gate, up), lambda: torch.cat(swiglu_backward(dh, gate, up), 1), fmt, 2 * H,
        _GLUON_BACKWARD, (rowwise, columnwise, power_of_2_scales), group_ends, group_tables,
        WHOLE_BLOCKS=H % fmt.block[1] == 0,
    )  # fmt: skip


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) [M, H]: what `swiglu_backward_quantize` quantises, by the same kernel."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _launch(_swiglu_backward_kernel, (dh, gate, up), (dgate, dup, None, None), False, WHOLE_BLOCKS=False)
    return dgate, dup
