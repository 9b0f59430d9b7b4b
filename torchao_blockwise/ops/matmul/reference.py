"""NT product of two quantised operands in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantize.reference import expand_blocks


def matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Σ over blocks k of (a_k · b_kᵀ) · scale_a · scale_b, in fp32, then · global scales, + bias, rounded once.

    a: [M, packed(K)], b: [N, packed(K)] -> [M, N]. Where a block of K is narrow (NVFP4), the block scales are applied
    to the elements first: an e2m1 element times an e4m3 scale is exact in fp32, so both ways are the same product.
    """
    columns = min(a.shape[1] * a_fmt.element.per_byte, b.shape[1] * b_fmt.element.per_byte)
    a_elements, b_elements = a_fmt.element.decode(a, columns), b_fmt.element.decode(b, columns)
    a_scale, b_scale = (
        s.float().mT if fmt.transposed_scales else s.float() for s, fmt in ((a_scale, a_fmt), (b_scale, b_fmt))
    )
    if a_global is not None and b_global is not None:
        a_elements = a_elements * expand_blocks(a_scale, a_fmt, *a_elements.shape)
        b_elements = b_elements * expand_blocks(b_scale, b_fmt, *b_elements.shape)
        # Autocast would redo this product in half precision.
        with torch.autocast(a.device.type, enabled=False):
            out = (a_elements @ b_elements.mT) * (a_global * b_global)
    else:
        step = a_fmt.block[1]
        a_scale = a_scale.repeat_interleave(a_fmt.block[0], dim=0)[: a.shape[0]]
        b_scale = b_scale.repeat_interleave(b_fmt.block[0], dim=0)[: b.shape[0]]
        out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
        with torch.autocast(a.device.type, enabled=False):
            for k, start in enumerate(range(0, columns, step)):
                partial = a_elements[:, start : start + step] @ b_elements[:, start : start + step].mT
                out += partial.mul_(a_scale[:, k, None]).mul_(b_scale[None, :, k])
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
