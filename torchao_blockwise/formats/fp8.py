"""Blockwise FP8 of DeepSeek-V3: e4m3 elements, fp32 scales, 1×128 activations and 128×128 weights.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), §3.3.
"""

from __future__ import annotations

import dataclasses

import torch

from torchao_blockwise.formats.block_format import BlockFormat, Scales, register_format
from torchao_blockwise.formats.elements import E4M3

MIN_AMAX = 1e-12
_F32_EXPONENT_AND_SIGN = -(1 << 23)


def _fp8_scales(block_amax: torch.Tensor, tensor_amax: torch.Tensor | None, power_of_2_scales: bool) -> Scales:
    """S = 448 / max(amax, 1e-12), optionally rounded down to a power of two; scale = 1 / S. NaN stays NaN."""
    amax = block_amax.clamp(min=MIN_AMAX)
    # Divide tensors by tensors, because PyTorch may replace a division with a scalar by a multiplication.
    encode = torch.full_like(amax, E4M3.max) / amax
    if power_of_2_scales:
        power = (encode.view(torch.int32) & _F32_EXPONENT_AND_SIGN).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, power)
    scale = torch.ones_like(encode) / encode
    # Devices produce NaNs with different bits; all implementations store this one.
    return Scales(encode, scale.masked_fill(scale.isnan(), float("nan")), None)


FP8_1X128 = register_format(
    BlockFormat(
        name="fp8_1x128",
        element=E4M3,
        block=(1, 128),
        scale_dtype=torch.float32,
        compute_scales=_fp8_scales,
        min_amax=MIN_AMAX,
        # GEMMs read the scales of all rows together in each step of the contraction.
        transposed_scales=True,
        has_power_of_2_scales=True,
    )
)

FP8_128X128 = register_format(
    dataclasses.replace(FP8_1X128, name="fp8_128x128", block=(128, 128), transposed_scales=False)
)
