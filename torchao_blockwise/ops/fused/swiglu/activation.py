"""SwiGLU and its gradients of fp32 values in Triton, for the kernels of kernels_triton.py and kernels_gluon.py."""

import triton
import triton.language as tl

from torchao_blockwise.ops.device.elements import reciprocal
from torchao_blockwise.ops.fused.swiglu import exponential

_LOW, _HIGH, _LEAST = (tl.constexpr(x) for x in (exponential.LOW, exponential.HIGH, exponential.LEAST))
_LOG2_E, _SHIFT = tl.constexpr(exponential.LOG2_E), tl.constexpr(exponential.SHIFT)
_C5, _C4, _C3, _C2, _C1 = (tl.constexpr(coefficient) for coefficient in exponential.POLYNOMIAL)
_MANTISSA_BITS = tl.constexpr(exponential.MANTISSA_BITS)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x), see exponential.py; what is made of it is multiplied by `x`, which brings a NaN back."""
    t = tl.maximum(tl.minimum(-x, _HIGH), _LOW) * _LOG2_E
    shifted = t + _SHIFT
    f = t - (shifted - _SHIFT)
    p = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + 1.0
    # The low bits of `shifted` are n; all others leave the word.
    exponent = shifted.to(tl.int32, bitcast=True) << _MANTISSA_BITS
    return reciprocal(1.0 + (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)) - _LEAST


@triton.jit
def swiglu(gate, up):
    """silu(gate) · up."""
    return gate * _sigmoid(gate) * up


@triton.jit
def swiglu_gradients(dh, gate, up):
    """(dgate, dup)."""
    s = _sigmoid(gate)
    return dh * up * (s * (1.0 + gate * (1.0 - s))), dh * (gate * s)
