"""Scales in Triton kernels: encode factors and stored scales of block amaxes, bitwise identical to formats/."""

import triton
import triton.language as tl

from torchao_blockwise.ops.device.elements import at_most_f32_max, canonical_nan, decode_e4m3, encode_e4m3_by_integers

_EXPONENT_AND_SIGN = tl.constexpr(-(1 << 23))


@triton.jit
def deal_out(x):
    """Return `x` unchanged, distributed over threads by a gather, so that each value is in one thread.

    A maximum leaves each result in many threads, and all of them would divide: along rows, 16 divisions in each thread
    for its 32 elements, or 32 in NVFP4. The compiler moves an ordinary change of layout after the divisions, but not a
    gather. The gather before the scales saves divisions; the one after them prevents the compiler from removing the
    first.
    """
    axis: tl.constexpr = len(x.shape) - 1
    index = tl.arange(0, x.shape[axis])
    if axis == 1:
        index = tl.broadcast_to(index[None, :], x.shape)
    return tl.gather(x, index, axis)


@triton.jit
def fp8_scales(amax_bits, ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """(encode, scale) of block amaxes; see formats/fp8.py."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    # A comparison and not a maximum, so that NaN propagates.
    amax = tl.where(amax < MIN_AMAX, MIN_AMAX, amax)
    encode = tl.div_rn(ELEMENT_MAX, amax)
    if POWER_OF_2:
        power = (encode.to(tl.int32, bitcast=True) & _EXPONENT_AND_SIGN).to(tl.float32, bitcast=True)
        encode = tl.where(encode == encode, power, encode)
    return encode, canonical_nan(tl.div_rn(1.0, encode))


@triton.jit
def fp8_vector_scales(amax_bits, ELEMENT_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """`fp8_scales` of a vector, each computed by one thread."""
    encode, scale = fp8_scales(deal_out(amax_bits), ELEMENT_MAX, MIN_AMAX, POWER_OF_2)
    return deal_out(encode), scale


@triton.jit
def nvfp4_scales(amax_bits, tensor_amax, ELEMENT_MAX: tl.constexpr, SCALE_MAX: tl.constexpr):
    """(encode, e4m3 scale bytes) of block amaxes; see formats/nvfp4.py."""
    tensor_encode = at_most_f32_max(tl.div_rn(ELEMENT_MAX * SCALE_MAX, tensor_amax))
    tensor_encode = tl.where(tensor_amax > 0, tensor_encode, 1.0)
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = encode_e4m3_by_integers(amax * (tensor_encode * tl.div_rn(1.0, ELEMENT_MAX)), SCALE_MAX)
    decoded = decode_e4m3(scale, 1.0).to(tl.float32)
    encode = at_most_f32_max(tl.div_rn(1.0, decoded * tl.div_rn(1.0, tensor_encode)))
    # With a block scale of zero (or NaN), the largest factor saturates values and keeps their signs.
    return at_most_f32_max(tl.where(decoded > 0, encode, float("inf"))), scale
