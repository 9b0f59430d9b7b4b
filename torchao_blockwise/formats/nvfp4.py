"""NVFP4: e2m1 elements, e4m3 block scales, one fp32 scale a tensor; 1×16 activations and 16×16 weights.

Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

import dataclasses

import torch

from torchao_blockwise.formats.block_format import BlockFormat, Scales, register_format
from torchao_blockwise.formats.elements import E2M1, E4M3

_F32_MAX = torch.finfo(torch.float32).max


def global_scale_of(tensor_amax: torch.Tensor) -> torch.Tensor:
    """Return the decode factor of a tensor: amax / (6 · 448); 1 for a zero tensor, NaN if the amax is NaN or Inf."""
    scale = tensor_amax / torch.full_like(tensor_amax, E2M1.max * E4M3.max)
    scale = torch.where(tensor_amax == 0, torch.ones_like(scale), scale)
    return scale.masked_fill(~tensor_amax.isfinite(), float("nan"))


def _nvfp4_scales(block_amax: torch.Tensor, tensor_amax: torch.Tensor | None, power_of_2_scales: bool) -> Scales:
    """With S = 2688 / amax(tensor): scale = e4m3(amax(block) · S / 6), encode = 1 / (scale / S)."""
    assert tensor_amax is not None and not power_of_2_scales
    one = torch.ones_like(tensor_amax)
    tensor_encode = (torch.full_like(tensor_amax, E2M1.max * E4M3.max) / tensor_amax).clamp(max=_F32_MAX)
    tensor_encode = torch.where(tensor_amax > 0, tensor_encode, one)
    sixth = one / torch.full_like(one, E2M1.max)
    scale = E4M3.encode(block_amax * (tensor_encode * sixth))
    decoded = scale.float()
    encode = torch.ones_like(decoded) / (decoded * (one / tensor_encode))
    # If a block scale is zero (or NaN), values keep their sign and saturate: the largest factor means "divide by zero".
    encode = torch.where(decoded > 0, encode.clamp(max=_F32_MAX), torch.full_like(encode, _F32_MAX))
    return Scales(encode, scale, global_scale_of(tensor_amax))


NVFP4_1X16 = register_format(
    BlockFormat(
        name="nvfp4_1x16",
        element=E2M1,
        block=(1, 16),
        scale_dtype=E4M3.storage_dtype,
        compute_scales=_nvfp4_scales,
        scale_max=E4M3.max,
        has_global_scale=True,
    )
)

NVFP4_16X16 = register_format(dataclasses.replace(NVFP4_1X16, name="nvfp4_16x16", block=(16, 16)))
