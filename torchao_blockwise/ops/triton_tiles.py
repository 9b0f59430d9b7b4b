"""What kernels share that compute a tile of values and quantise it where it is: its FP8 copies, and plain stores.

A tile is computed ROWS at a time: all at once would not fit in registers beside what it takes to compute.

         BLOCK
    ┌──────────────┐     rowwise: blocks are rows; they are stored as soon as they are computed
    │ y₀     ROWS  │
    │ y₁           │     columnwise: blocks are columns, whose scales are known at the end; until then the tile waits in
    │ ..           │     registers, rounded to its dtype
    └──────────────┘
"""

import functools

import torch
import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantize.triton import _load_tile, _store_tile
from torchao_blockwise.ops.triton_elements import encode_e4m3, magnitude_bits, to_f32
from torchao_blockwise.ops.triton_scales import fp8_vector_scales

# (rows computed at a time, warps) by the copies that are stored: (rowwise, columnwise). Chosen so that nothing spills:
# with more rows at a time, or fewer threads, what is computed does not fit in registers.
_ROWS = {(False, False): (16, 4), (True, False): (32, 4), (False, True): (32, 16), (True, True): (16, 16)}
_ALIGNMENT = 16


@functools.cache
def options_of(fmt: BlockFormat, rowwise: bool, columnwise: bool, power_of_2_scales: bool) -> dict:
    """Constants and options of a kernel that stores these copies, or plain values where neither is asked for."""
    rows, warps = _ROWS[rowwise, columnwise]
    return {
        "ROWS": rows,
        "TILE_M": fmt.block[1] if columnwise else rows,
        "BLOCK": fmt.block[1],
        "ELEMENT_MAX": fmt.element.max,
        "MIN_AMAX": fmt.min_amax,
        "POWER_OF_2": power_of_2_scales,
        "ROWWISE": rowwise,
        "COLUMNWISE": columnwise,
        "num_warps": warps,
        # An operation that shows two roundings must not become one FMA with one.
        "enable_fp_fusion": False,
    }


def pointers(copies: list[torch.Tensor], rowwise: bool, columnwise: bool) -> list[torch.Tensor | None]:
    """(q, s, qt, st) of a kernel from the copies asked for: payload as bytes, None for what is not asked for."""
    given = iter([t.view(torch.uint8) if t.itemsize == 1 else t for t in copies])
    return [next(given) if asked else None for asked in (rowwise, rowwise, columnwise, columnwise)]


def width_of_rows(copies: list[torch.Tensor], columnwise: bool) -> int | None:
    """Bytes of a row of the columnwise payload, of the copies asked for; None where there is none."""
    return copies[-2].shape[-1] if columnwise else None


def columnwise_needs_rowwise(width: int) -> bool:
    """Whether a kernel that writes a columnwise copy alone, of rows so wide, would spill: it writes both then.

    Where rows do not start on 16 bytes every element has an address of its own. The stores of the rowwise copy stand
    between the rows that are computed at a time; without them the compiler reads all rows at once.
    """
    return width % _ALIGNMENT != 0


@triton.jit
def load_tile(x_ptr, offs_m, offs_k, M, K, stride_xm, stride_xk):
    """fp32 of a tile of `x` [M, K], zero outside."""
    return _load_tile(x_ptr, 0, offs_m, offs_k, M, K, 0, stride_xm, stride_xk)


@triton.jit
def store_plain(y_ptr, y, offs_m, offs_k, M, K):
    """The tile into a contiguous [M, K]."""
    _store_tile(y_ptr, 0, y, offs_m, offs_k, M, K)


@triton.jit
def store_rowwise(
    y,  # [ROWS, BLOCK] fp32, zero outside of the matrix
    q_ptr,  # [M, K] e4m3 bytes
    s_ptr,  # [K/BLOCK, M] f32
    tile_k,
    offs_m,
    offs_k,
    M,
    K,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    end_m=None,  # rows from here on are not the tile's; M for None
):
    """Quantise rows of a tile as `ops.quantize` does and store them."""
    end_m = M if end_m is None else end_m
    encode, scale = fp8_vector_scales(tl.max(magnitude_bits(y), 1), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    _store_tile(q_ptr, 0, encode_e4m3(y * encode[:, None], ELEMENT_MAX), offs_m, offs_k, end_m, K)
    tl.store(s_ptr + tile_k.to(tl.int64) * M + offs_m, scale, mask=offs_m < end_m)


@triton.jit
def _stacked_transposed(parts):
    """Tensors [ROWS, COLUMNS], 4 or 8 of them, one under the other and then transposed: [COLUMNS, n · ROWS].

    A join adds a dim at the end: the first ones the high bit of a part's number, the last one the low bit.
    """
    ROWS: tl.constexpr = parts[0].shape[0]
    COLUMNS: tl.constexpr = parts[0].shape[1]
    if len(parts) == 4:
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])).permute(1, 2, 3, 0)
    else:
        tl.static_assert(len(parts) == 8)
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        joined = tl.join(even, odd).permute(1, 2, 3, 4, 0)
    return joined.reshape(COLUMNS, len(parts) * ROWS)


@triton.jit
def store_columnwise(
    ys,  # TILE_M / ROWS tensors [ROWS, BLOCK], the tile from top to bottom, zero outside of the matrix
    magnitude,  # [ROWS, BLOCK] the largest `magnitude_bits` of all of them
    qt_ptr,  # [K, width_qt] e4m3 bytes
    st_ptr,  # [M/BLOCK, K] f32
    tile_m,
    offs_k,
    width_qt,  # bytes of a row of qt: M and padding
    K,
    ELEMENT_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise the columns of a tile as `ops.quantize` does and store them."""
    ROWS: tl.constexpr = magnitude.shape[0]
    encode, scale = fp8_vector_scales(tl.max(magnitude, 0), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    qs = ()
    for i in tl.static_range(BLOCK // ROWS):
        qs = qs + (encode_e4m3(to_f32(ys[i]) * encode[None, :], ELEMENT_MAX),)  # type: ignore[assignment]  # noqa: RUF005
    _store_tile(qt_ptr, 0, _stacked_transposed(qs), offs_k, tile_m * BLOCK + tl.arange(0, BLOCK), K, width_qt)
    tl.store(st_ptr + tile_m.to(tl.int64) * K + offs_k, scale, mask=offs_k < K)
