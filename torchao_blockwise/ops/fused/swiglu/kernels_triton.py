"""SwiGLU and its gradients in Triton, quantized in the pass that computes them.

Forward, h = silu(gate) · up, a program takes a tile of both. The gradients lie side by side: a (of the gate) and b (of
up) are computed by a program each, neighbors, as they read the same tiles of gate, up and dh:

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

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies, Groups
from torchao_blockwise.ops.device.elements import from_f32, to_f32
from torchao_blockwise.ops.device.groups import locate_rows
from torchao_blockwise.ops.device.tiles import load_tile, options_of, store_rowwise, store_tile
from torchao_blockwise.ops.fused.swiglu import activation
from torchao_blockwise.ops.groups.tables.kernels_triton import block_table
from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.operands import new_copies, pointers
from torchao_blockwise.ops.quantization.kernels_triton import quantize


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [M, H] bf16 | f16 | f32
    up_ptr,  # [M, H] of the same dtype
    h_ptr,  # [M, H] of the same dtype: written where no copy is asked for
    q_ptr,
    s_ptr,
    blocks_ptr,  # None, or where tokens lie in groups their table, see device/groups.py
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
        store_tile(h_ptr, h, offs_m, offs_h, M, H)


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,  # [M, H] bf16 | f16 | f32
    gate_ptr,  # [M, H]
    up_ptr,  # [M, H]
    dgate_ptr,  # [M, H] of the dtype of gate: written where no copy is asked for
    dup_ptr,  # [M, H], likewise
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
        # Programs that read the same tiles are neighbors, so that the second reading comes from cache.
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
        store_tile(dgate_ptr, from_f32(dgate, dtype), offs_m, offs_h, M, H)
        store_tile(dup_ptr, from_f32(dup, dtype), offs_m, offs_h, M, H)


def _launch(kernel, inputs, outputs, rowwise, power_of_2_scales=False, blocks=None, **flags) -> None:
    """Run `kernel` on `inputs` [M, H]. outputs: its pointers, None for what is not asked for, payload as bytes."""
    M, H = inputs[0].shape
    if M == 0 or H == 0:
        return
    options = options_of(FP8_1X128, rowwise, power_of_2_scales)
    # A program computes one of two gradients where it quantizes, and both where it stores them as they are.
    width = 2 * H if rowwise and kernel is _swiglu_backward_kernel else H
    tiles = ceil_div(M, options["ROWS"]) * ceil_div(width, options["BLOCK"])
    strides = [stride for x in inputs for stride in x.stride()]
    launch(kernel, tiles, *inputs, *outputs, blocks, M, H, *strides, **flags, **options)


def _quantize(kernel, inputs, plain, shape, options: CastOptions, groups: Groups | None, **flags) -> Copies:
    """The copies asked for of what `kernel` makes of `inputs`, of that shape. plain: makes it as it is."""
    x, fmt = inputs[0], options.fmt
    if options.columnwise:
        return quantize(plain(), None, options, groups)
    copies = new_copies(x, shape, options, groups)
    if x.numel() > 0:
        blocks = None if groups is None else block_table(groups, x.shape[0], fmt)
        outputs = [None] * (len(inputs) - 1) + pointers(copies)[:2]
        _launch(kernel, inputs, outputs, True, options.power_of_2_scales, blocks, **flags)
    return copies


def swiglu_quantize(gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None) -> Copies:
    """Copies of silu(gate) · up, in those groups."""
    return _quantize(_swiglu_kernel, (gate, up), lambda: swiglu(gate, up), gate.shape, options, groups)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [M, H]: what `swiglu_quantize` quantizes, by the same kernel."""
    h = gate.new_empty(gate.shape)
    _launch(_swiglu_kernel, (gate, up), (h, None, None), False)
    return h


def swiglu_backward_quantize(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, options: CastOptions, groups: Groups | None
) -> Copies:
    """Copies of the [M, 2H] gradient (dgate | dup), in those groups."""
    M, H = gate.shape
    return _quantize(
        _swiglu_backward_kernel, (dh, gate, up), lambda: torch.cat(swiglu_backward(dh, gate, up), 1), (M, 2 * H),
        options, groups, WHOLE_BLOCKS=H % options.fmt.block[1] == 0,
    )  # fmt: skip


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) [M, H]: what `swiglu_backward_quantize` quantizes, by the same kernel."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _launch(_swiglu_backward_kernel, (dh, gate, up), (dgate, dup, None, None), False, WHOLE_BLOCKS=False)
    return dgate, dup
