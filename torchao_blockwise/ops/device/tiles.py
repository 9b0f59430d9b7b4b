"""What kernels share that compute a tile of values: its rowwise FP8 copy, made where it is, and plain stores."""

from typing import Any

import triton
import triton.language as tl

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.device.elements import encode_e4m3, magnitude_bits
from torchao_blockwise.ops.device.scales import fp8_vector_scales
from torchao_blockwise.ops.quantization.kernels_triton import _load_tile, _store_tile

# (rows of a tile, warps) of kernels that store plain values, and of those that store the rowwise copy. Chosen so that
# nothing spills: with more rows, or fewer threads, what is computed does not fit in registers.
_PLAIN, _ROWWISE = (16, 4), (32, 4)


def options_of(fmt: BlockFormat, rowwise: bool, power_of_2_scales: bool) -> dict[str, Any]:
    """Constants and options of a kernel that stores the rowwise copy, or plain values."""
    rows, warps = _ROWWISE if rowwise else _PLAIN
    return {
        "ROWS": rows,
        "BLOCK": fmt.block[1],
        "ELEMENT_MAX": fmt.element.max,
        "MIN_AMAX": fmt.min_amax,
        "POWER_OF_2": power_of_2_scales,
        "ROWWISE": rowwise,
        "num_warps": warps,
        # An operation that shows two roundings must not become one FMA with one.
        "enable_fp_fusion": False,
    }


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
    """Quantize rows of a tile as `ops.quantize` does and store them."""
    end_m = M if end_m is None else end_m
    encode, scale = fp8_vector_scales(tl.max(magnitude_bits(y), 1), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    _store_tile(q_ptr, 0, encode_e4m3(y * encode[:, None], ELEMENT_MAX), offs_m, offs_k, end_m, K)
    tl.store(s_ptr + tile_k.to(tl.int64) * M + offs_m, scale, mask=offs_m < end_m)
