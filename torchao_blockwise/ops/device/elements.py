"""Elements in Triton kernels: the bit codecs of e4m3 and e2m1, exact on GPUs and in Triton's interpreter alike.

Payload crosses these helpers as bytes (e4m3) or as one code a byte (e2m1). The interpreter keeps bfloat16 and 8-bit
floats as plain integers, truncates where it casts to bfloat16, rounds ties away from zero where it casts to e4m3, and
knows no e4m3 NaN; so bits are made here with integer operations, but for the conversion to e4m3, which GPUs have.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.backend import interpreting

INTERPRETING = tl.constexpr(interpreting())

# Fields of an fp32.
_MANTISSA_BITS = tl.constexpr(23)
_BIAS = tl.constexpr(127)
_EXPONENT = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN_SHIFT = tl.constexpr(31)
_TWO_TO_23 = tl.constexpr(0x4B000000)
_QUIET_NAN = tl.constexpr(0x7FC00000)
_F32_MAX = tl.constexpr(torch.finfo(torch.float32).max)

_E4M3_MANTISSA_BITS, _E4M3_MIN_EXPONENT = tl.constexpr(3), tl.constexpr(-6)
_E4M3_MAGNITUDE, _E4M3_NAN = tl.constexpr(0x7F), tl.constexpr(0x7F)
_E2M1_MANTISSA_BITS, _E2M1_MIN_EXPONENT = tl.constexpr(1), tl.constexpr(0)
_E2M1_MAGNITUDE, _E2M1_SIGN_SHIFT = tl.constexpr(0x7), tl.constexpr(3)


@triton.jit
def to_f32(x):
    """fp32 of bf16 | f16 | f32 values, exact, subnormals included."""
    if INTERPRETING and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def from_f32(x, dtype: tl.constexpr):
    """`x` rounded to nearest even in bf16 | f16 | f32."""
    if INTERPRETING and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # As bits: the interpreter's own cast gives subnormals the wrong mantissa.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, _QUIET_NAN >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def round_both(a, b, dtype: tl.constexpr):
    """fp32 `a` and `b` rounded to nearest even in bf16 | f16 | f32, in fp32; NaN as 0x7fff0000 or as `from_f32` has it.

    GPUs round two to bf16 in one instruction, at eight times the rate of one.
    """
    if INTERPRETING or dtype != tl.bfloat16:
        return to_f32(from_f32(a, dtype)), to_f32(from_f32(b, dtype))
    else:
        both = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            constraints="=r,f,f",
            args=[a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|. Read as integers they have the order of the magnitudes, with Inf above all and NaN above Inf.

    A maximum of these propagates NaN, which a maximum of floats does not.
    """
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """`magnitude_bits` of max |x| along `axis`, of bf16 | f16 | f32 `x` in fp32; NaN propagates.

    Values of 16 bits are compared as they are, two in a register: as fp32 a tile would take twice the registers.
    """
    if x.dtype.primitive_bitwidth == 32:
        return tl.max(magnitude_bits(x), axis)
    else:
        magnitude = x.to(tl.int16, bitcast=True) & 0x7FFF
        if INTERPRETING:
            largest = tl.max(magnitude, axis).to(tl.int16)
        else:
            # `tl.max` would compare in 32 bits.
            largest = tl.reduce(magnitude, axis, _larger)
        return magnitude_bits(to_f32(largest.to(x.dtype, bitcast=True)))


@triton.jit
def canonical_nan(x):
    """fp32 `x` with every NaN as 0x7fc00000: devices give NaNs of different bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & _MAGNITUDE) > _EXPONENT, _QUIET_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x rounded to nearest even, of fp32 `x` from 1 to 2^126; NaN stays.

    The GPU's estimate and a step of Newton's: 3 instructions, where a division that knows no bounds takes ten. That it
    is rounded right a test shows on every mantissa.
    """
    if INTERPRETING:
        return tl.div_rn(1.0, x)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .f32 estimate, negative, error;
            rcp.approx.ftz.f32 estimate, $1;
            neg.f32 negative, $1;
            fma.rn.f32 error, negative, estimate, 0f3F800000;
            fma.rn.f32 $0, error, estimate, estimate;
        }
        """,
        constraints="=f,f",
        args=[x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def at_most_f32_max(x):
    """`x` with +Inf as the largest finite fp32; NaN stays."""
    return tl.where(x > _F32_MAX, _F32_MAX, x)


@triton.jit
def _encode_magnitude(y, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Code of min(|y|, MAX), rounded to nearest even, in a small float without its sign; undefined for NaN.

    With |y| in [2^e, 2^(e+1)) the small float has a step of 2^(e - MANTISSA_BITS), below its least normal number that
    number's step. Added to the power of two whose fp32 step is just that, |y| is rounded by the adder.
    """
    least_normal: tl.constexpr = (_BIAS + MIN_EXPONENT) << _MANTISSA_BITS
    dropped_bits: tl.constexpr = _MANTISSA_BITS - MANTISSA_BITS
    # The minimum also stands between a caller's product and the sum, so no FMA can contract them.
    magnitude = tl.minimum(tl.abs(y), MAX)
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), least_normal) & _EXPONENT
    rounder = power + (dropped_bits << _MANTISSA_BITS)
    steps = (magnitude + rounder.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - rounder
    return steps + ((power - least_normal) >> dropped_bits)


@triton.jit
def encode_e4m3_by_integers(y, MAX: tl.constexpr):
    """`encode_e4m3` in integer operations: for block scales, of which there are few, and for the interpreter."""
    sign = (y.to(tl.int32, bitcast=True) >> _SIGN_SHIFT) & 1
    code = _encode_magnitude(y, MAX, _E4M3_MANTISSA_BITS, _E4M3_MIN_EXPONENT) | (sign << 7)
    return tl.where(y == y, code, _E4M3_NAN).to(tl.uint8)


@triton.jit
def encode_e4m3(y, MAX: tl.constexpr):
    """e4m3 bytes of fp32 `y`, rounded to nearest even, saturating at ±MAX; -0 is kept and every NaN is 0x7f.

    Four at a time: ptxas 12.8, which Triton 3.6 and 3.7 carry, loses bytes of half-defined words, and a lone
    conversion of two leaves half of its word undefined.
    """
    if INTERPRETING:
        return encode_e4m3_by_integers(y, MAX)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        constraints="=r,f,f,f,f",
        args=[y],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode_e4m3(byte, SCALE: tl.constexpr):
    """f16 of e4m3 bytes times SCALE, a power of two in [2^-8, 2^7]: exact.

    The bits shifted to f16's fields make a number 2^8 (the difference of the biases) too small, subnormals included.
    """
    magnitude = (byte & _E4M3_MAGNITUDE).to(tl.uint16)
    bits = (magnitude << 7) | ((byte >> 7).to(tl.uint16) << 15)
    value = bits.to(tl.float16, bitcast=True) * (256.0 * SCALE)
    return tl.where(magnitude == _E4M3_NAN, float("nan"), value)


@triton.jit
def encode_e2m1(y, MAX: tl.constexpr):
    """e2m1 codes of fp32 `y`, one a byte, rounded to nearest even, saturating at ±MAX; -0 is kept and NaN is 0."""
    sign = (y.to(tl.int32, bitcast=True) >> _SIGN_SHIFT) & 1
    code = _encode_magnitude(y, MAX, _E2M1_MANTISSA_BITS, _E2M1_MIN_EXPONENT) | (sign << _E2M1_SIGN_SHIFT)
    return tl.where(y == y, code, 0).to(tl.uint8)


@triton.jit
def encode_e2m1_stochastically(y, random, MAX: tl.constexpr):
    """e2m1 codes of fp32 `y`, one a byte, rounded by random bits from 0 to 255, saturating at ±MAX; NaN is 0.

    A step of the grid at |y|, times random / 256, is added, and what is below a step cut off. From 1 on the code is the
    exponent and the first bit of the mantissa.
    """
    sign = (y.to(tl.int32, bitcast=True) >> _SIGN_SHIFT) & 1
    v = tl.minimum(tl.abs(y), MAX)
    # A conversion takes as long as eight sums: 2^23 + random by its bits, less 2^23.
    number = (random | _TWO_TO_23).to(tl.float32, bitcast=True) - 8388608.0
    power = tl.maximum(v.to(tl.int32, bitcast=True), _BIAS << _MANTISSA_BITS) & _EXPONENT
    step = (power - ((_E2M1_MANTISSA_BITS + 8) << _MANTISSA_BITS)).to(tl.float32, bitcast=True)
    t = tl.minimum(v + number * step, MAX)
    half: tl.constexpr = (_BIAS - 1) << _MANTISSA_BITS
    shift: tl.constexpr = _MANTISSA_BITS - _E2M1_MANTISSA_BITS
    normal = (t.to(tl.int32, bitcast=True) - half) >> shift
    code = tl.where(t >= 1.0, normal, (t >= 0.5).to(tl.int32)) | (sign << _E2M1_SIGN_SHIFT)
    return tl.where(y == y, code, 0).to(tl.uint8)


# 2^14, the difference of the biases of f16 and e2m1.
E2M1_FACTOR = tl.constexpr(2.0**14)


@triton.jit
def decode_e2m1(code):
    """f16 of e2m1 codes (bits above 3 are ignored) divided by `E2M1_FACTOR`: exact."""
    magnitude = (code & _E2M1_MAGNITUDE).to(tl.uint16)
    sign = ((code >> _E2M1_SIGN_SHIFT) & 1).to(tl.uint16)
    return ((magnitude << 9) | (sign << 15)).to(tl.float16, bitcast=True)
