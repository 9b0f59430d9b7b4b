"""Permute and unpermute in Triton: a counting sort of assignments by expert, then whole rows move.

    count     ids → counts [128, E]           a chunk of assignments a program: how many of them go to each expert
    place     ids, counts → source, row_of    a chunk a program: assignment a goes to the row after all of smaller
                                              experts, those of the same expert in chunks before, and those before it in
                                              its chunk. Each program sums all counts for itself, which costs less than
                                              a launch between. Of few assignments it counts all itself: one launch.
    scatter   x [T, H] → out [T · top_k, H]   an assignment a program: its token's row, weighted, goes to its place; the
                                              dot product with the row in that place of another tensor is summed on the
                                              way. Neighboring programs read the same row: memory gives it once.
    gather    y → out [T, H]                  a strip of a token a program: top_k rows, ascending k, loaded at once

The last two use `row_of`, the inverse of `source`. They check its entries, so that an invalid source never leads
outside the tensors.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.device.elements import from_f32, to_f32
from torchao_blockwise.ops.launch import ceil_div, launch

# Elements of a strip: 16 bytes a thread in 16 bits.
_STRIP, _WARPS = 1024, 4
_INVERT_ROWS = 1024
# Chunks of assignments: a program each, about as many as a GPU has processors. With more, the table of counts, which
# each of them sums, would be longer.
_CHUNKS = 128
# Assignments counted at once, and those ranked at once, each against each: as many as threads, so that no two threads
# have the same to load and to count.
_COUNT, _PIECE, _SORT_WARPS = 512, 128, 4
# Counts of the table that are summed at once, 16 KiB, and how many such tiles are on their way or in use: to wait for
# one after the other would take longer than all else.
_TABLE, _TABLE_STAGES = 4096, 4
# Up to here programs count all assignments themselves, in two steps at most: sooner done than another launch.
_FEW = 2 * _COUNT


@triton.jit
def _load_experts(ids_ptr, offs, end, experts):
    """Experts of assignments `offs`, int32; those of no expert, and those from `end` on, have `experts`."""
    ids = tl.load(ids_ptr + offs, mask=offs < end, other=-1)
    # Compared before it is cast: what int64 holds may look like an expert in int32.
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


@triton.jit
def _count(ids_ptr, first, end, experts, COUNT: tl.constexpr, E_PAD: tl.constexpr):
    """How many of the assignments first .. end - 1 go to each expert, int32 [E_PAD]."""
    counts = tl.zeros((E_PAD,), tl.int32)
    for start in range(first, end, COUNT):
        ids = _load_experts(ids_ptr, start + tl.arange(0, COUNT), end, experts)
        counts += tl.histogram(ids, E_PAD, mask=ids < experts)
    return counts


@triton.jit(do_not_specialize=["rows", "length"])
def _count_kernel(
    ids_ptr,  # int32 | int64 [T · top_k]
    counts_ptr,  # int32 [chunks, E_PAD]
    rows,
    length,  # of a chunk
    experts,
    COUNT: tl.constexpr,
    E_PAD: tl.constexpr,
):
    chunk = tl.program_id(0)
    counts = _count(ids_ptr, chunk * length, min((chunk + 1) * length, rows), experts, COUNT, E_PAD)
    tl.store(counts_ptr + chunk * E_PAD + tl.arange(0, E_PAD), counts)


@triton.jit(do_not_specialize=["rows", "length"])
def _place_kernel(
    ids_ptr,  # int32 | int64 [T · top_k]
    counts_ptr,  # int32 [CHUNKS, E_PAD], or None: counted here
    source_ptr,  # int32 [T · top_k]
    row_of_ptr,  # int32 [T · top_k]
    ends_ptr,  # int32 [experts]
    rows,
    length,  # of a chunk
    experts,
    CHUNKS: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    TABLE_STAGES: tl.constexpr,
    COUNT: tl.constexpr,
    PIECE: tl.constexpr,
    E_PAD: tl.constexpr,
):
    chunk = tl.program_id(0)
    first = chunk * length
    expert = tl.arange(0, E_PAD)
    if counts_ptr is None:
        sizes = _count(ids_ptr, 0, rows, experts, COUNT, E_PAD)
        before = _count(ids_ptr, 0, first, experts, COUNT, E_PAD)
    else:
        # Summed over rows at the end: until then no thread needs another's. [TABLE_ROWS, E_PAD]
        all_sums = tl.zeros((TABLE_ROWS, E_PAD), tl.int32)
        sums_before = tl.zeros((TABLE_ROWS, E_PAD), tl.int32)
        for start in tl.range(0, CHUNKS, TABLE_ROWS, num_stages=TABLE_STAGES):
            other = start + tl.arange(0, TABLE_ROWS)[:, None]
            counts = tl.load(counts_ptr + other * E_PAD + expert[None, :])
            all_sums += counts
            sums_before += tl.where(other < chunk, counts, 0)
        sizes, before = tl.sum(all_sums, 0), tl.sum(sums_before, 0)
    ends = tl.cumsum(sizes, 0)
    if chunk == 0:
        tl.store(ends_ptr + expert, ends, mask=expert < experts)
    starts, last_end = ends - sizes, tl.sum(sizes)
    index = tl.arange(0, PIECE)
    end = min(first + length, rows)
    for start in range(first, end, PIECE):
        ids = _load_experts(ids_ptr, start + index, end, experts)
        # [earlier, assignment], because sums over the first dim are sums of a thread's own registers.
        same = (ids[:, None] == ids[None, :]) & (index[:, None] < index[None, :])
        rank = tl.sum(same.to(tl.int32), 0)
        # Of `start` assignments before this piece, all but these with an expert have none.
        rest = last_end + start - tl.sum(before)
        row = rank + tl.where(ids < experts, tl.gather(starts + before, tl.minimum(ids, E_PAD - 1), 0), rest)
        inside = start + index < end
        tl.store(row_of_ptr + start + index, row, mask=inside)
        tl.store(source_ptr + row, start + index, mask=inside)
        before += tl.histogram(ids, E_PAD, mask=ids < experts)


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
    # No element of a row that is outside. Masks of blocks and scalars are int32 in Triton 3.9's interpreter.
    width = tl.where((row >= 0) & (row < rows), H, 0)
    x_ptr += (assignment // TOP_K).to(tl.int64) * H
    start = row.to(tl.int64) * H
    total = tl.zeros((STRIP,), tl.float32)
    for strip in range(0, H, STRIP):
        offs = strip + tl.arange(0, STRIP)
        mask = offs < width
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
        mask = offs < tl.where((row >= 0) & (row < rows), H, 0)
        term = to_f32(tl.load(y_ptr + row.to(tl.int64) * H + offs, mask=mask, other=0.0))
        if weights_ptr is not None:
            term *= to_f32(tl.load(weights_ptr + token * TOP_K + k))
        # The first term as it is: zero plus a -0 would be +0.
        out = term if k == 0 else out + term  # noqa: F821
    out = from_f32(out, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * H + offs, out, mask=offs < H)


def _route(expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(source, group_ends, row_of) of one assignment or more."""
    ids, rows = expert_ids.contiguous(), expert_ids.numel()
    source, row_of = (ids.new_empty(rows, dtype=torch.int32) for _ in range(2))
    group_ends = ids.new_empty(experts, dtype=torch.int32)
    # Bins of a histogram: a lane of a warp has at least one.
    padded = max(32, triton.next_power_of_2(experts))
    sizes = {"COUNT": _COUNT, "E_PAD": padded, "num_warps": _SORT_WARPS}
    if rows <= _FEW:
        counts, length = None, _PIECE
    else:
        length = ceil_div(rows, _CHUNKS)
        counts = ids.new_empty((_CHUNKS, padded), dtype=torch.int32)
        launch(_count_kernel, _CHUNKS, ids, counts, rows, length, experts, **sizes)
    launch(
        _place_kernel, min(_CHUNKS, ceil_div(rows, length)),
        ids, counts, source, row_of, group_ends, rows, length, experts,
        CHUNKS=_CHUNKS, TABLE_ROWS=min(_CHUNKS, _TABLE // padded), TABLE_STAGES=_TABLE_STAGES, PIECE=_PIECE, **sizes,
    )  # fmt: skip
    return source, group_ends, row_of


def _inverse(source: torch.Tensor) -> torch.Tensor:
    row_of, rows = torch.empty_like(source), source.numel()
    launch(_invert_kernel, ceil_div(rows, _INVERT_ROWS), source, row_of, rows, ROWS=_INVERT_ROWS, num_warps=_WARPS)
    return row_of


def _options(top_k: int) -> dict:
    # Two roundings that an operation shows must not become one FMA with one.
    return {"TOP_K": top_k, "STRIP": _STRIP, "num_warps": _WARPS, "enable_fp_fusion": False}


def _flat(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.contiguous()


def permute(x: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, source, group_ends); see `ops.permute`."""
    if expert_ids.numel() == 0:
        source, group_ends = (x.new_zeros(n, dtype=torch.int32) for n in (0, experts))
        return x.new_empty(0, x.shape[1]), source, group_ends
    source, group_ends, row_of = _route(expert_ids, experts)
    return _scatter(x, None, row_of, expert_ids.shape[1], None)[0], source, group_ends


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
    return _scatter(grad_output, y, _inverse(source.contiguous()), top_k, weights)


def _scatter(x, y, row_of: torch.Tensor, top_k: int, weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of x, weighted, each in `top_k` places, and where there is a y, dot products with the rows in these."""
    tokens, width = x.shape
    rows = tokens * top_k
    out = x.new_empty(rows, width)
    dots = None if y is None else x.new_empty((tokens, top_k), dtype=torch.float32)
    if rows > 0:
        arguments = (
            x.contiguous(), None if y is None else y.contiguous(), _flat(weights), row_of, out, dots, rows, width,
        )  # fmt: skip
        launch(_scatter_kernel, rows, *arguments, **_options(top_k))
    return out, dots
