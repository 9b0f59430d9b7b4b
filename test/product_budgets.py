"""How far products may be from the fp64 product of what their operands decode to: worked out, not measured."""

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def pair_id(pair) -> str:
    return "-".join(fmt.name for fmt in pair)


def decoded(q, k: int) -> torch.Tensor:
    """fp64 [rows, K] with an exact product of element and scales."""
    ones = torch.ones_like(q.global_scale) if q.format.has_global_scale else None
    x = ops.dequantize(q._replace(global_scale=ones), columns=k, dtype=torch.float64)
    return x if ones is None else x * q.global_scale.double()


# Of FP8 tensor cores, relative to the largest magnitude of a sum.
FP8_UNIT = 2.0**-13


def raised(q):
    """The operand with the smallest normal e4m3 number, 2^-6, in place of each subnormal one.

    Tensor cores align products by the exponents of their factors, and a subnormal factor has that of 2^-6: what is cut
    off is relative to this, not to the product.
    """
    x = q.qdata.float()
    least = torch.where(x == 0, 0.0, torch.finfo(torch.float8_e4m3fn).smallest_normal)
    return q._replace(qdata=x.abs().maximum(least).to(q.qdata.dtype))


def accumulation_unit(backend: str, fmt, device: str) -> float:
    """Rounding of one step of the accumulation, relative to the sum of magnitudes.

    Hopper's FP8 tensor cores keep about 14 bits within the 128 terms that are summed before promotion to fp32
    (DeepSeek-V3 report §3.3.2); for bf16 operands they truncate to fp32's 24 bits instead of rounding.
    """
    if backend == "reference" or device == "cpu":
        return 2.0**-24
    return FP8_UNIT if fmt.element is E4M3 else 2.0**-22


OUT_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
OUT_TINY = {torch.bfloat16: 0.0, torch.float16: 2.0**-25, torch.float32: 0.0}


def assert_within_budget(out, a, b, k: int, unit: float, bias=None) -> None:
    """|out - exact| ≤ (√K + 6) · unit · (|a| · |b|ᵀ + |bias|) + half an ulp of the output.

    A sum of K terms rounded at each step drifts like √K steps (worst case K); 6 more are the roundings of a block's two
    scales, of the two global scales' product and its use, of decoded FP8 scale products and of the bias. Of FP8 tensor
    cores, |a| and |b| are those of `raised`.
    """
    exact = decoded(a, k) @ decoded(b, k).mT
    a, b = (decoded(raised(x) if unit == FP8_UNIT else x, k).abs() for x in (a, b))
    magnitude = a @ b.mT
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    accumulation = (k**0.5 + 6) * unit * magnitude
    rounding = OUT_UNIT[out.dtype] * (exact.abs() + accumulation) + OUT_TINY[out.dtype]
    excess = (out.double() - exact).abs() - (accumulation + rounding)
    # What is beyond the output's range is infinite there.
    overflows = exact.abs() + accumulation >= torch.finfo(out.dtype).max
    excess = excess.masked_fill(overflows & (out.double() == exact.sign() * torch.inf), 0)
    assert out.shape == exact.shape
    assert not (excess > 0).any(), f"{int((excess > 0).sum())} of {out.numel()} outside, by up to {excess.max():.3g}"
