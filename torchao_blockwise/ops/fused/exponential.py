"""Constants of sigmoid in fp32, computed with operations that round identically on all devices.

CPU and GPU libraries differ in the last bits of exp, but quantized bits must not depend on the device. So:

    t = clamp(-x, LOW, HIGH) · LOG2_E
    n = rint(t), f = t - n                      t + SHIFT - SHIFT rounds to an integer; the difference is exact
    e^-x = p(f) · 2^n                           p(f) ≈ 2^f: 1 + f · POLYNOMIAL, by Horner's rule, highest power first
    sigmoid = 1 / (1 + e^-x) - LEAST            LEAST: the quotient at HIGH

e^LOW is much less than the last bit of 1 + e^LOW. Subtracting LEAST makes sigmoid 0 for x <= -HIGH, where it would be
LEAST because of the clamp, and does not change values above 2^24 · LEAST. 1 + e^HIGH is below 2^126, so that no
reciprocal is subnormal. The relative error of e^x is at most (3 + |x|) · 2^-23, where |x| comes from rounding t.
POLYNOMIAL is the minimax fit of (2^f - 1) / f for |f| <= 1/2, with a relative error of 2^f below 9.2e-8.
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
