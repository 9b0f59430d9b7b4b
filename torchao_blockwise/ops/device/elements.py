"""Elements in Triton kernels: encoding and decoding of e4m3 and e2m1, exact on GPUs and in Triton's interpreter.

These helpers represent payload as bytes (e4m3) or as one code in each byte (e2m1). Triton's interpreter stores bfloat16
and 8-bit floats as integers, truncates in casts to bfloat16, rounds ties away from zero in casts to e4m3, and does not
support e4m3 NaN. So these functions use integer operations, except for conversion to e4m3 in the hardware of GPUs.
"""

import torch
import triton
import triton.language as tl

from torchao_blockwise.ops.backend import interpreting

INTERPRETING = tl.constexpr(interpreting())
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Fields of fp32.
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
        # With integers, because the interpreter's cast returns a wrong mantissa for subnormals.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, _QUIET_NAN >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def round_both(a, b, dtype: tl.constexpr):
    """Round fp32 `a` and `b` to nearest even in bf16 | f16 | f32; return fp32. NaN is 0x7fff0000, or as in `from_f32`.

    GPUs round two values to bf16 with one instruction, at eight times the rate of one value.
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
    """Return the bits of |x|. As integers, they have the order of the magnitudes, with NaN above Inf above all others.

    So their maximum propagates NaN, unlike a maximum of floats.
    """
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """`magnitude_bits` of max |x| along `axis`, of bf16 | f16 | f32 `x` in fp32; NaN propagates.

    16-bit values are compared in pairs in a register. In fp32, a tile would take twice the registers.
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
    """Return fp32 `x` with every NaN as 0x7fc00000, because the bits of NaN differ between devices."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & _MAGNITUDE) > _EXPONENT, _QUIET_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x rounded to nearest even, for fp32 `x` from 1 to 2^126; NaN propagates.

    The GPU's estimate and a Newton step: 3 instructions, while a division without bounds takes ten. A test checks that
    every mantissa is rounded correctly.
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
    """Return `x` with +Inf replaced by the largest finite fp32; NaN propagates."""
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
    """`encode_e4m3` with integer operations, for block scales, which are few, and for the interpreter."""
    sign = (y.to(tl.int32, bitcast=True) >> _SIGN_SHIFT) & 1
    code = _encode_magnitude(y, MAX, _E4M3_MANTISSA_BITS, _E4M3_MIN_EXPONENT) | (sign << 7)
    return tl.where(y == y, code, _E4M3_NAN).to(tl.uint8)


@triton.jit
def encode_e4m3(y, MAX: tl.constexpr):
    """e4m3 bytes of fp32 `y`, rounded to nearest even, saturating at ±MAX; -0 is kept and every NaN is 0x7f.

    Converts four values at a time: a conversion of two leaves half of its word undefined, and ptxas 12.8, which Triton
    3.6 and 3.7 use, loses bytes of such words.
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
    """Return e4m3 bytes times SCALE, a power of two in [2^-8, 2^7], as f16: exact.

    Shifted to the fields of f16, the bits are a number that is too small by 2^8, the difference of the biases, also for
    subnormals.
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

    Adds random / 256 of a step of the grid at |y|, and rounds down to a step. From 1 on, the code is the exponent and
    the first bit of the mantissa.
    """
    sign = (y.to(tl.int32, bitcast=True) >> _SIGN_SHIFT) & 1
    v = tl.minimum(tl.abs(y), MAX)
    # A conversion takes as long as eight additions, so the bits of 2^23 + random are set, and 2^23 is subtracted.
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
