"""e^x in fp32 by operations that round alike everywhere; the constants that the reference and the kernels share.

Libraries of CPUs and GPUs differ in the last bits of exp, and quantised bits must not depend on the device. So:

    x = clamp(x, LOW, HIGH)
    n = rint(x · LOG2_E)                        x + SHIFT - SHIFT rounds to an integer
    r = (x - n · LN2_HIGH) - n · LN2_LOW        n · LN2_HIGH and the first difference are exact
    e^x = (1 + (r + r² · q(r))) · 2^n           q: POLYNOMIAL, by Horner's rule, highest power first

Below LOW the result is e^LOW, far under the last bit of 1 + e^x; at HIGH n is 128, whose power of two has the bits of
Inf. The result is within 1.5 ulp. POLYNOMIAL is the minimax fit of (e^r - 1 - r) / r² for |r| <= ln(2) / 2 under
relative error 3.6e-9 of e^r.
"""

LOW, HIGH = -87.0, 89.0
LOG2_E = 1.4426950216293335
SHIFT = 1.5 * 2.0**23
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.428606765330187e-06
POLYNOMIAL = (
    0.0013814540579915047,
    0.00836874544620514,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
)
MANTISSA_BITS, BIAS = 23, 127
