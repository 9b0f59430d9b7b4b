"""Permute and unpermute in Triton: whole rows move, a program a strip of one or an assignment.

    scatter   x [T, H] → out [T · top_k, H]   an assignment a program: its token's row, weighted, goes to its place; the
                                              dot product with the row in that place of another tensor is summed on the
                                              way. Neighbouring programs read the same row: memory gives it once.
    gather    y → out [T, H]                  a strip of a token a program: top_k rows, ascending k, loaded at once

Both go by `row_of`, the inverse of `source`. Its entries are checked where they are used, so that no source reaches
memory outside of the tensors.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.launch import ceil_div, launch
from torchao_blockwise.ops.triton_elements import from_f32, to_f32

# Elements of a strip: 16 bytes a thread in 16 bits.
_STRIP, _WARPS = 1024, 4
_INVERT_ROWS = 1024


@triton.jit(do_not_specialize=["rows"])
def _invert_kernel(source_ptr, row_of_ptr, rows, ROWS: tl.constexpr):
    """row_of[source[i]] = i."""
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_ptr + offs, mask=offs < rows, other=-1)
    tl.store(row_of_ptr + source, offs, mask=(source >= 0) & (source < rows))


@triton.jit(do_not_specialize=["rows"])
def _scatter_kernel(
    x_ptr,  # [T, H] bf16 | f16 | f32
    y_ptr,  # [T · top_k, H] of the same dtype, or None: what x is multiplied with for `dots`
    weights_ptr,  # [T · top_k] or None
    row_of_ptr,  # int32 [T · top_k]
    out_ptr,  # [T · top_k, H]
    dots_ptr,  # f32 [T · top_k] or None
    rows,
    H,
    TOP_K: tl.constexpr,
    STRIP: tl.constexpr,
):
    assignment = tl.program_id(0)
    row = tl.load(row_of_ptr + assignment)
    inside = (row >= 0) & (row < rows)
    x_ptr += (assignment // TOP_K).to(tl.int64) * H
    start = row.to(tl.int64) * H
    total = tl.zeros((STRIP,), tl.float32)
    for strip in range(0, H, STRIP):
        offs = strip + tl.arange(0, STRIP)
        mask = (offs < H) & inside
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        if y_ptr is not None:
            total += to_f32(x) * to_f32(tl.load(y_ptr + start + offs, mask=mask, other=0.0))
        if weights_ptr is not None:
            x = from_f32(to_f32(x) * to_f32(tl.load(weights_ptr + assignment)), out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + offs, x, mask=mask)
    if y_ptr is not None:
        tl.store(dots_ptr + assignment, tl.sum(total))


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    y_ptr,  # [T · top_k, H] bf16 | f16 | f32
    weights_ptr,  # [T · top_k] or None
    row_of_ptr,  # int32 [T · top_k]
    out_ptr,  # [T, H]
    rows,
    H,
    TOP_K: tl.constexpr,
    STRIP: tl.constexpr,
):
    strips = tl.cdiv(H, STRIP)
    token = tl.program_id(0) // strips
    offs = tl.program_id(0) % strips * STRIP + tl.arange(0, STRIP)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_ptr + token * TOP_K + k)
        mask = (offs < H) & (row >= 0) & (row < rows)
        term = to_f32(tl.load(y_ptr + row.to(tl.int64) * H + offs, mask=mask, other=0.0))
        if weights_ptr is not None:
            term *= to_f32(tl.load(weights_ptr + token * TOP_K + k))
        # The first term as it is: zero plus a -0 would be +0.
        out = term if k == 0 else out + term  # noqa: F821
    out = from_f32(out, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * H + offs, out, mask=offs < H)


def _inverse(source: torch.Tensor) -> torch.Tensor:
    row_of, rows = torch.empty_like(source), source.numel()
    launch(_invert_kernel, ceil_div(rows, _INVERT_ROWS), source, row_of, rows, ROWS=_INVERT_ROWS, num_warps=_WARPS)
    return row_of


def _options(top_k: int) -> dict:
    # Two roundings that an operation shows must not become one FMA with one.
    return {"TOP_K": top_k, "STRIP": _STRIP, "num_warps": _WARPS, "enable_fp_fusion": False}


def _flat(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.contiguous()


def unpermute(y: torch.Tensor, source: torch.Tensor, top_k: int, weights: torch.Tensor | None) -> torch.Tensor:
    """Σ_k weights[t, k] · y[row of assignment t · top_k + k]; see `ops.unpermute`."""
    rows, width = y.shape
    out = y.new_empty(rows // top_k, width)
    if out.numel() > 0:
        programs = rows // top_k * ceil_div(width, _STRIP)
        arguments = (y.contiguous(), _flat(weights), _inverse(source.contiguous()), out, rows, width)
        launch(_gather_kernel, programs, *arguments, **_options(top_k))
    return out


def unpermute_backward(
    grad_output: torch.Tensor, y: torch.Tensor | None, source: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """grad_y and, where there is a y, grad_weights; see `ops.unpermute_backward`."""
    tokens, width = grad_output.shape
    rows = tokens * top_k
    grad_y = grad_output.new_empty(rows, width)
    dots = None if y is None else grad_output.new_empty((tokens, top_k), dtype=torch.float32)
    if rows > 0:
        arguments = (
            grad_output.contiguous(), None if y is None else y.contiguous(), _flat(weights),
            _inverse(source.contiguous()), grad_y, dots, rows, width,
        )  # fmt: skip
        launch(_scatter_kernel, rows, *arguments, **_options(top_k))
    return grad_y, dots
