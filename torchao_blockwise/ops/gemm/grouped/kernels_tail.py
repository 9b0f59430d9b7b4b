"""Zeros for the rows of no group, in Triton: for kernels that leave them as they are.

The device alone knows where they begin. Programs of rows before that return at once.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.launch import ceil_div, launch

# Rows of a program, the columns that it writes at a time, and warps.
_ROWS, _COLUMNS, _WARPS = 16, 512, 4


@triton.jit(do_not_specialize=["M"])
def _zero_tail_kernel(
    out_ptr,  # [M, N]
    ends_ptr,  # [groups] int32, none beyond M
    M,
    N,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first, tail = tl.program_id(0) * ROWS, tl.load(ends_ptr + groups - 1)
    if first + ROWS <= tail:
        return
    rows = first + tl.arange(0, ROWS)
    mask = (rows >= tail) & (rows < M)
    row_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N
    zeros = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
    for column in range(0, N, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        tl.store(row_ptrs + columns[None, :], zeros, mask=mask[:, None] & (columns < N)[None, :])


def zero_tail_(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Rows of `out` [M, N] from the last of `ends` on become zeros. ends: int32 [E], in [0, M]."""
    (M, N), groups = out.shape, ends.shape[0]
    launch(
        _zero_tail_kernel, ceil_div(M, _ROWS), out, ends, M, N, groups, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
