"""sigmoid in fp32 by operations that round alike everywhere; the constants that the reference and the kernels share.

Libraries of CPUs and GPUs differ in the last bits of exp, and quantized bits must not depend on the device. So:

    t = clamp(-x, LOW, HIGH) · LOG2_E
    n = rint(t), f = t - n                      t + SHIFT - SHIFT rounds to an integer; the difference is exact
    e^-x = p(f) · 2^n                           p(f) ≈ 2^f: 1 + f · POLYNOMIAL, by Horner's rule, highest power first
    sigmoid = 1 / (1 + e^-x) - LEAST            LEAST: what the quotient is at HIGH

e^LOW is far under the last bit of 1 + e^LOW. The last difference makes sigmoid 0 for x <= -HIGH, where the clamp would
hold it at LEAST, and leaves what is above 2^24 · LEAST as it was: 1 + e^HIGH is below 2^126, so that no reciprocal is
subnormal. The relative error of e^x is at most (3 + |x|) · 2^-23, of which |x| is the rounding of t. POLYNOMIAL is the
minimax fit of (2^f - 1) / f for |f| <= 1/2 under relative error 9.2e-8 of 2^f.
"""

LOW, HIGH = -40.0, 87.0
LOG2_E = 1.4426950216293335
SHIFT = 1.5 * 2.0**23
POLYNOMIAL = (
    0.0013264728477224708,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
)
LEAST = 1.645815097130401e-38
MANTISSA_BITS = 23
