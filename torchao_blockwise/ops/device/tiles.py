"""Tiles of values in kernels: locating, loading and storing them, and their rowwise FP8 copies."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.device.elements import encode_e4m3, magnitude_bits, to_f32
from torchao_blockwise.ops.device.scales import fp8_vector_scales

# (rows of a tile, warps) of kernels that store plain values, and of those that store the rowwise copy. With more rows
# or fewer threads, they would spill.
_PLAIN, _ROWWISE = (16, 4), (32, 4)


@dataclass(frozen=True, eq=False)
class Build:
    """The constants of a kernel that stores the rowwise copy, or plain values."""

    rows: int  # of a tile
    block: int
    element_max: float
    min_amax: float
    power_of_2: bool
    rowwise: bool


@functools.cache
def options_of(fmt: BlockFormat, rowwise: bool, power_of_2_scales: bool) -> dict[str, Any]:
    """Return the build of a kernel, and options of its launch. There is one object for each build."""
    rows, warps = _ROWWISE if rowwise else _PLAIN
    build = Build(rows, fmt.block[1], fmt.element.max, fmt.min_amax, power_of_2_scales, rowwise)
    # An FMA would round once where a formula has two roundings.
    return {"B": build, "num_warps": warps, "enable_fp_fusion": False}


def matrices_of(x: torch.Tensor) -> tuple[torch.Tensor, int, tuple[int, ...]]:
    """Return (`x` [.., M, K] as [B, M, K] or [M, K], B, three strides), the arguments of batched kernels."""
    if x.dim() == 2:
        return x, 1, (0, *x.stride())
    x = x.flatten(0, -3)
    return x, x.shape[0], x.stride()


@triton.jit
def locate_tile(tile, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BATCHED: tl.constexpr):
    """(matrix, tile row, tile column, rows of tiles, columns of tiles) of a tile; columns run fastest."""
    tiles_m, tiles_k = tl.cdiv(M, TILE_M), tl.cdiv(K, TILE_K)
    batch, tile_m = tl.full([], 0, tl.int64), tile // tiles_k
    if BATCHED:
        # A division takes 20 instructions, as many as quantizing two or three values.
        batch, tile_m = (tile_m // tiles_m).to(tl.int64), tile_m % tiles_m
    return batch, tile_m, tile % tiles_k, tiles_m, tiles_k


@triton.jit
def load_values(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk, batch=0, stride_xb=0):
    """A tile of `x` [.., M, K] in its dtype, zero outside."""
    offsets = offs_m.to(tl.int64)[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    return tl.load(x_ptr + batch * stride_xb + offsets, mask=mask, other=0.0)


@triton.jit
def load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk, batch=0, stride_xb=0):
    """A tile of `x` in fp32, zero outside."""
    return to_f32(load_values(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk, batch, stride_xb))


@triton.jit
def store_tile(ptr, values, offs_row, offs_column, rows, columns, batch=0):
    """Store `values` into a contiguous [.., rows, columns]."""
    offsets = offs_row.to(tl.int64)[:, None] * columns + offs_column[None, :]
    mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
    tl.store(ptr + batch * rows * columns + offsets, values, mask=mask)


@triton.jit
def store_rowwise(
    y,  # [rows, block] fp32, zero outside the matrix
    q_ptr,  # [M, K] e4m3 bytes
    s_ptr,  # [K/BLOCK, M] f32
    tile_k,
    offs_m,
    offs_k,
    M,
    K,
    B: tl.constexpr,  # a Build
    end_m=None,  # the end of the tile's rows; None for M
):
    """Quantize rows of a tile as `ops.quantize` does and store them."""
    end_m = M if end_m is None else end_m
    encode, scale = fp8_vector_scales(tl.max(magnitude_bits(y), 1), B.element_max, B.min_amax, B.power_of_2)
    store_tile(q_ptr, encode_e4m3(y * encode[:, None], B.element_max), offs_m, offs_k, end_m, K)
    tl.store(s_ptr + tile_k.to(tl.int64) * M + offs_m, scale, mask=offs_m < end_m)
