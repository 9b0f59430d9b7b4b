"""How much noise a format's rounding leaves in a product: worked out from the format and the data, not measured.

Values between two neighbors of a format are rounded to the nearer one. Data with a smooth density p lies about evenly
between them, so the error has variance w² / 12, w being the distance of the neighbors (W. R. Bennett, 1948). A slope
of p changes nothing, for the square of the error is symmetric about the middle; its curvature changes the variance by
the factor 1 - 7/240 · w² · p″/p. Two kinds of elements do not lie evenly: the largest of a block, which the scale puts
where it wants, and what saturates. Their error is known.

Errors of elements are independent and have no mean, so in a product a·bᵀ the energies of

    δa · bᵀ,  a · δbᵀ,  δa · δbᵀ

add, and what is expected of each is a product of squares. All of this is fp64 and takes nothing from the package but
which format is meant: kernels and references are both judged by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import E4M3, BlockFormat

# How far a measured energy may lie from the expected one, in standard deviations: once in 500 million.
DEVIATIONS = 6


class Rounded(NamedTuple):
    """fp64 values [rows, K], and the variance of the error that their quantization adds to each."""

    values: torch.Tensor
    variance: torch.Tensor

    def curvature(self) -> float:
        """By which part the whole variance may differ for normal data, for which p″/p = (z² - 1) / σ², z = x / σ."""
        sigma = self.values.square().mean().sqrt()
        squared_steps, z = 12 * self.variance, self.values / sigma
        parts = 7 / 240 * squared_steps / sigma**2 * (z.square() - 1).abs()
        return ((parts * self.variance).sum() / self.variance.sum()).item()


def step(magnitude: torch.Tensor, min_exponent: int, mantissa_bits: int) -> torch.Tensor:
    """Distance of the neighbors of a number with that many mantissa bits; below 2^min_exponent it stays the same."""
    exponent = magnitude.clamp_min(2.0**min_exponent).log2().floor()
    return (exponent - mantissa_bits).exp2()


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each element's block, [rows, K]."""
    (rows, columns), (block_rows, block_columns) = x.shape, block
    padded = F.pad(x.abs(), (0, -columns % block_columns, 0, -rows % block_rows))
    grid = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows)).amax((1, 3))
    return grid.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]


def rounded(x: torch.Tensor, fmt: BlockFormat, power_of_2_scales=False) -> Rounded:
    """`x` [rows, K] as `fmt` rounds it."""
    x = x.detach().double().cpu()
    magnitude, largest = x.abs(), block_amax(x, fmt.block)
    if fmt.element is E4M3:
        encode = 448 / largest
        if power_of_2_scales:
            encode = encode.log2().floor().exp2()
        error = step(magnitude * encode, -6, 3) / encode
        variance = error.square() / 12
        # The largest of a block becomes 448, which e4m3 has.
        return Rounded(x, variance if power_of_2_scales else variance.masked_fill(magnitude == largest, 0.0))
    tensor_encode = 448 * 6 / magnitude.max().item()
    # Block scales are e4m3 too, which leaves the largest of a block beside 6, and the format has nothing above.
    block_scale = (largest * tensor_encode / 6).float().to(torch.float8_e4m3fn).double()
    encode = tensor_encode / block_scale
    scaled = magnitude * encode
    known = (magnitude == largest) | (scaled > 6)
    variance = torch.where(known, (scaled - 6).square(), step(scaled, 0, 1).square() / 12)
    return Rounded(x, variance / encode.square())


def noise_ratio(
    out: torch.Tensor, a: Rounded, b: Rounded, accumulation: float = 0.0, bias: torch.Tensor | None = None
) -> tuple[float, float, float]:
    """(measured / expected energy of the error, the least and the most that it may be) of a·bᵀ.

    out: [M, N] as it was computed of a [M, K] and b [N, K], normal operands without structure.
    accumulation: the error that sums may have besides, relative to the magnitudes that they are sums of.

    For one row the energy of δa·bᵀ is the quadratic form δaᵀ·G·δa with G = bᵀb. Of independent δa its variance is
    2·tr(G²)/tr(G)² at most, relative to its mean squared: 2·(1/K + 1/N). The M rows are independent, which divides
    that by M.
    """
    (m, k), n = a.values.shape, b.values.shape[0]
    exact = a.values @ b.values.mT
    if bias is not None:
        exact = exact + bias.detach().double().cpu()
    measured = (out.detach().double().cpu() - exact).square().sum().item()
    of_a = (a.variance @ b.values.mT.square()).sum().item()
    of_b = (a.values.square() @ b.variance.mT).sum().item()
    # The second order, and the one rounding of the output.
    mantissa_bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[out.dtype]
    rest = (a.variance @ b.variance.mT).sum() + (step(exact.abs(), -126, mantissa_bits).square() / 12).sum()
    expected = of_a + of_b + rest.item()
    variance = of_a**2 * 2 * (1 / k + 1 / n) / m + of_b**2 * 2 * (1 / k + 1 / m) / n
    extra = (accumulation * (a.values.abs() @ b.values.mT.abs())).square().sum().item()
    spread = (DEVIATIONS * variance**0.5 + of_a * a.curvature() + of_b * b.curvature()) / expected
    return measured / expected, 1 - spread, 1 + spread + extra / expected


def assert_noise_is_expected(what: str, *product, **options) -> None:
    """A GEMM has the noise of its operands' rounding: no more, and no less, so low precision was there."""
    ratio, least, most = noise_ratio(*product, **options)
    assert least <= ratio <= most, f"{what}: {ratio:.4f} of the expected noise, not within {least:.4f}..{most:.4f}"


def accumulation(device: str, k: int) -> float:
    """The error of sums of K terms, relative to their magnitudes; as budgets of products have it (product_budgets.py).

    fp32 drifts like √K roundings. Hopper's tensor cores keep 14 bits within each of a block's 4 steps of K = 32.
    """
    return 4 * 2.0**-13 if device == "cuda" else (k**0.5 + 6) * 2.0**-24
