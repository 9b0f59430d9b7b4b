"""Four over six in Triton kernels: of two scales (formats/nvfp4.py) a block takes the one with the smaller error.

The caller computes the errors, because the values of a block lie in a tile as it likes; launches with these have
`enable_fp_fusion=False`, so that a product and a sum stay two roundings.
"""

import triton
import triton.language as tl

from torchao_blockwise.ops.device.elements import E2M1_FACTOR, decode_e2m1, decode_e4m3, encode_e2m1
from torchao_blockwise.ops.device.scales import enlarged_nvfp4_scales

_ENLARGED = tl.constexpr(1.5)


@triton.jit
def candidates(amax_bits, tensor_amax, ELEMENT_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, SCALE_MAX: tl.constexpr):
    """(encode, e4m3 scale bytes) by which a block's largest value becomes 6, and those by which it becomes 4."""
    encode, scale = enlarged_nvfp4_scales(amax_bits, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX, SCALE_MAX, 1.0)
    encode_4, scale_4 = enlarged_nvfp4_scales(amax_bits, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX, SCALE_MAX, _ENLARGED)
    return encode, scale, encode_4, scale_4


@triton.jit
def error_of(x, encode, scale, tensor_amax, ELEMENT_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr):
    """|decoded - x| of fp32 values, rounded to nearest by these factors and bytes of their blocks."""
    rounded = decode_e2m1(encode_e2m1(x * encode, ELEMENT_MAX)).to(tl.float32) * E2M1_FACTOR
    global_scale = tl.div_rn(tensor_amax, ELEMENT_MAX * FOUR_OVER_SIX)
    return tl.abs(rounded * decode_e4m3(scale, 1.0).to(tl.float32) * global_scale - x)


@triton.jit
def take_smaller(error, error_4, encode, scale, encode_4, scale_4):
    """(encode, scale) of the candidate with the smaller error; of equal ones, and of NaN, the first."""
    takes_four = error_4 < error
    return tl.where(takes_four, encode_4, encode), tl.where(takes_four, scale_4, scale)


@triton.jit
def _sum_of_pairs(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr):
    even, odd = tl.split(x.reshape(ROWS, BLOCKS, PAIRS, 2))
    return even + odd


@triton.jit
def _sum_of_blocks(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Σ over the last dim of [ROWS, BLOCKS, 16]: of neighbors, of neighboring sums, and so on."""
    sums = _sum_of_pairs(x, ROWS, BLOCKS, 8)
    sums = _sum_of_pairs(sums, ROWS, BLOCKS, 4)
    sums = _sum_of_pairs(sums, ROWS, BLOCKS, 2)
    return _sum_of_pairs(sums, ROWS, BLOCKS, 1).reshape(ROWS, BLOCKS)


@triton.jit
def _of_elements(tensor_amax):
    """The tensor's amax, or those of rows [ROWS, 1], as they meet elements."""
    if len(tensor_amax.shape) == 0:
        return tensor_amax
    else:
        return tensor_amax[:, :, None]


@triton.jit
def four_over_six_rows(
    x,  # fp32 [ROWS, BLOCKS, 16]
    amax_bits,  # [ROWS, BLOCKS]
    tensor_amax,  # a scalar, or [ROWS, 1]
    ELEMENT_MAX: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(encode, e4m3 scale bytes) [ROWS, BLOCKS] of blocks that lie along the rows."""
    encode, scale, encode_4, scale_4 = candidates(amax_bits, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX, SCALE_MAX)
    of_elements = _of_elements(tensor_amax)
    error = error_of(x, encode[:, :, None], scale[:, :, None], of_elements, ELEMENT_MAX, FOUR_OVER_SIX)
    error_4 = error_of(x, encode_4[:, :, None], scale_4[:, :, None], of_elements, ELEMENT_MAX, FOUR_OVER_SIX)
    error, error_4 = _sum_of_blocks(error, ROWS, BLOCKS), _sum_of_blocks(error_4, ROWS, BLOCKS)
    return take_smaller(error, error_4, encode, scale, encode_4, scale_4)


@triton.jit
def _sums_of_neighbors(values, PAIRS: tl.constexpr):
    sums = ()
    for i in tl.static_range(PAIRS):
        sums = sums + (values[2 * i] + values[2 * i + 1],)  # noqa: RUF005  # Triton knows no unpacking.
    return sums


@triton.jit
def _sum_of_chunks(tiles, encode, scale, tensor_amax, ELEMENT_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr):
    """Σ of the errors of 16 tiles, in the order of `_sum_of_blocks`."""
    errors = ()
    for i in tl.static_range(16):
        errors = errors + (error_of(tiles[i], encode, scale, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX),)  # noqa: RUF005
    sums = _sums_of_neighbors(_sums_of_neighbors(_sums_of_neighbors(errors, 8), 4), 2)
    return sums[0] + sums[1]


@triton.jit
def four_over_six_chunks(
    tiles,  # 16 of fp32 [CHUNKS, COLUMNS]: the values of a block, one each
    amax_bits,  # [CHUNKS, COLUMNS]
    tensor_amax,  # a scalar, or [CHUNKS, 1]
    ELEMENT_MAX: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SCALE_MAX: tl.constexpr,
):
    """(encode, e4m3 scale bytes) [CHUNKS, COLUMNS] of blocks that lie across tiles."""
    encode, scale, encode_4, scale_4 = candidates(amax_bits, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX, SCALE_MAX)
    error = _sum_of_chunks(tiles, encode, scale, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX)
    error_4 = _sum_of_chunks(tiles, encode_4, scale_4, tensor_amax, ELEMENT_MAX, FOUR_OVER_SIX)
    return take_smaller(error, error_4, encode, scale, encode_4, scale_4)
