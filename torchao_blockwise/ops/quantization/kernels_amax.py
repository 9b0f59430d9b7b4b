"""The largest magnitude of a tensor, and its tensor scale, in Triton: one read, and two small launches.

    x  ── a chunk a turn ──▶ largest magnitude of each program ── atomic maximum of its bits ──▶ amax ──▶ global scale
    x  ── a tile a turn ───▶ largest magnitude of each row ── atomic maximum of its group's ──▶ amaxes ──▶ global scales

As integers, the bits of magnitudes have the same order, so the maximum is exact in any order of programs.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import E2M1, E4M3
from torchao_blockwise.ops.device.elements import magnitude_bits, to_f32
from torchao_blockwise.ops.device.groups import groups_of, load_block
from torchao_blockwise.ops.launch import ceil_div, launch

_CHUNK = 8192
_WARPS = 8
# More programs than fit on a GPU at the same time, but few enough that their atomic maxima take no time.
_PROGRAMS = 1024
# Rows and columns of a tile if each group of rows has an amax.
_TILE = (8, 1024)
# Rows whose amax a program looks up, by comparing all ends with each of them.
_LOOKED_UP = 16
# Scales that a program computes.
_SCALES = 256


@triton.jit
def _amax_kernel(
    x_ptr,  # rows side by side
    ends_ptr,  # int32 [E], of rows in groups, or None
    amax_ptr,  # int32, bits of an fp32, zero before
    M,
    K,
    E,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, E at least
):
    rows = M
    if ends_ptr is not None:
        offs_e = tl.arange(0, GROUPS)
        ends = tl.load(ends_ptr + offs_e, mask=offs_e < E, other=0)
        rows = tl.minimum(tl.max(ends, 0), M)
    size = (tl.zeros((), tl.int64) + rows) * K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    mask_of_sign: tl.constexpr = 0x7FFFFFFF if dtype.primitive_bitwidth == 32 else 0x7FFF
    largest = tl.zeros((CHUNK,), word)
    for chunk in range(tl.program_id(0), tl.cdiv(size, CHUNK).to(tl.int32), tl.num_programs(0)):
        offs = (tl.zeros((CHUNK,), tl.int64) + chunk) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
        largest = tl.maximum(largest, x.to(word, bitcast=True) & mask_of_sign)
    most = tl.max(largest, 0).to(word).to(dtype, bitcast=True)
    tl.atomic_max(amax_ptr, magnitude_bits(to_f32(most)))


@triton.jit(do_not_specialize=["rows", "rows_of_group", "groups"])
def _group_amaxes_kernel(
    x_ptr,  # rows side by side
    ends_ptr,  # int32 [groups], or None where each group has `rows_of_group` rows
    amax_ptr,  # int32 [groups], bits of an fp32, zero before
    rows,
    K,
    rows_of_group,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    E_PAD: tl.constexpr,  # a power of two, `groups` at least
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    mask_of_sign: tl.constexpr = 0x7FFFFFFF if dtype.primitive_bitwidth == 32 else 0x7FFF
    tiles_k = tl.cdiv(K, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * tiles_k, tl.num_programs(0)):
        offs_m = (tile // tiles_k) * ROWS + tl.arange(0, ROWS)
        offs_k = (tile % tiles_k) * COLUMNS + tl.arange(0, COLUMNS)
        if ends_ptr is None:
            group = offs_m // rows_of_group
        else:
            group, _ = groups_of(offs_m, ends_ptr, rows, groups, E_PAD)
        mask = ((offs_m < rows) & (group < groups))[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        most = tl.max(x.to(word, bitcast=True) & mask_of_sign, 1).to(word).to(dtype, bitcast=True)
        bits = magnitude_bits(to_f32(most))
        first = tl.min(group, 0)
        if first == tl.max(group, 0):
            # Most tiles are in one group.
            tl.atomic_max(amax_ptr + first, tl.max(bits, 0), mask=first < groups)
        else:
            tl.atomic_max(amax_ptr + group, bits, mask=group < groups)


@triton.jit(do_not_specialize=["count", "tokens", "groups"])
def _looked_up_kernel(
    amax_ptr,  # [groups] f32
    ends_ptr,  # int32 [groups]
    blocks_ptr,  # the groups' table, or None for rows
    out_ptr,  # [count] f32
    count,
    tokens,
    groups,
    ROWS: tl.constexpr,
    E_PAD: tl.constexpr,
):
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = offs
    if blocks_ptr is not None:
        rows, _, _ = load_block(blocks_ptr, tl.minimum(offs, count - 1))
    inside, out_ptrs = offs < count, out_ptr + offs
    group, _ = groups_of(rows, ends_ptr, tokens, groups, E_PAD)
    tl.store(out_ptrs, tl.load(amax_ptr + group, mask=group < groups, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _global_scale_kernel(amax_ptr, scale_ptr, count, LARGEST: tl.constexpr, SCALES: tl.constexpr):
    if SCALES == 1:
        _store_scale(amax_ptr, scale_ptr, None, LARGEST)
    else:
        offs = tl.program_id(0) * SCALES + tl.arange(0, SCALES)
        _store_scale(amax_ptr + offs, scale_ptr + offs, offs < count, LARGEST)


@triton.jit
def _store_scale(amax_ptr, scale_ptr, mask, LARGEST: tl.constexpr):
    amax = tl.load(amax_ptr, mask=mask)
    scale = tl.div_rn(amax, LARGEST)
    scale = tl.where(amax == 0, 1.0, scale)
    # x - x is 0 except for Inf and NaN.
    tl.store(scale_ptr, tl.where(amax - amax == 0, scale, float("nan")), mask=mask)


def _group_amaxes(x: torch.Tensor, group_ends: torch.Tensor | None, bits: torch.Tensor) -> None:
    """Write the amax of each group of rows of `x`, or of each of its matrices, to `bits`, which are zeros."""
    (rows, columns), K, groups = _TILE, x.shape[-1], bits.numel()
    M = x.numel() // K
    launch(
        _group_amaxes_kernel, min(ceil_div(M, rows) * ceil_div(K, columns), _PROGRAMS),
        x.contiguous(), group_ends, bits, M, K, x.shape[-2], groups,
        ROWS=rows, COLUMNS=columns, E_PAD=triton.next_power_of_2(groups), num_warps=_WARPS,
    )  # fmt: skip


def tensor_amax_bits(x: torch.Tensor, group_ends: torch.Tensor | None, each: bool) -> torch.Tensor:
    """Arguments and result as in the op."""
    if each:
        shape = x.shape[:-2] if group_ends is None else group_ends.shape
        bits = torch.zeros(shape, dtype=torch.int32, device=x.device)
        if x.numel() > 0:
            _group_amaxes(x, group_ends, bits)
        return bits
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel() > 0:
        K, E = x.shape[-1], 1 if group_ends is None else group_ends.shape[0]
        grid = min(ceil_div(x.numel(), _CHUNK), _PROGRAMS)
        launch(
            _amax_kernel, grid, x.contiguous(), group_ends, bits, x.numel() // K, K, E,
            CHUNK=_CHUNK, GROUPS=triton.next_power_of_2(E), num_warps=_WARPS,
        )  # fmt: skip
    return bits


def amaxes_of_each(
    amax: torch.Tensor, ends: torch.Tensor, blocks: torch.Tensor | None, tokens: int, count: int
) -> torch.Tensor:
    """Return the amax of the group of each row, or of each block of 16 tokens, f32 [count]; 0 after the last group.

    amax: f32 [E]. blocks: the table of blocks, or None for rows. Kernels that quantize load these values, because
    comparing all ends with the rows of a tile would take too many registers.
    """
    each, groups = torch.empty(count, dtype=torch.float32, device=amax.device), ends.shape[0]
    launch(
        _looked_up_kernel, ceil_div(count, _LOOKED_UP), amax, ends, blocks, each, count, tokens, groups,
        ROWS=_LOOKED_UP, E_PAD=triton.next_power_of_2(groups),
    )  # fmt: skip
    return each


def global_scale(amax_bits: torch.Tensor) -> torch.Tensor:
    """Arguments and result as in the op."""
    scale = torch.empty(amax_bits.shape, dtype=torch.float32, device=amax_bits.device)
    scales = _SCALES if amax_bits.dim() else 1
    if scale.numel() > 0:
        launch(
            _global_scale_kernel, ceil_div(scale.numel(), scales),
            (amax_bits.contiguous(), torch.float32), scale, scale.numel(),
            LARGEST=E2M1.max * E4M3.max, SCALES=scales, num_warps=1,
        )  # fmt: skip
    return scale
