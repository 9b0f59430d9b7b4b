"""NT product of two quantized operands in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.quantization.reference import expand_blocks


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Σ over blocks k of (a_k · b_kᵀ) · scale_a · scale_b, in fp32, then · global scales, + bias, rounded once.

    a: [M, packed(K)], b: [N, packed(K)] -> [M, N]. Where a block of K is narrow (NVFP4), the block scales are applied
    to the elements first: an e2m1 element times an e4m3 scale is exact in fp32, so both ways are the same product.
    """
    a_fmt, b_fmt = a.format, b.format
    columns = min(a.qdata.shape[1], b.qdata.shape[1]) * a_fmt.element.per_byte
    a_elements, b_elements = a_fmt.element.decode(a.qdata, columns), b_fmt.element.decode(b.qdata, columns)
    a_scale = a.scale.float().mT if a_fmt.transposed_scales else a.scale.float()
    b_scale = b.scale.float().mT if b_fmt.transposed_scales else b.scale.float()
    if a.global_scale is not None and b.global_scale is not None:
        a_elements = a_elements * expand_blocks(a_scale, a_fmt, *a_elements.shape)
        b_elements = b_elements * expand_blocks(b_scale, b_fmt, *b_elements.shape)
        # Autocast would redo this product in half precision.
        with torch.autocast(a_scale.device.type, enabled=False):
            out = (a_elements @ b_elements.mT) * (a.global_scale * b.global_scale)
    else:
        step = a_fmt.block[1]
        a_scale = a_scale.repeat_interleave(a_fmt.block[0], dim=0)[: len(a_elements)]
        b_scale = b_scale.repeat_interleave(b_fmt.block[0], dim=0)[: len(b_elements)]
        out = torch.zeros(len(a_elements), len(b_elements), dtype=torch.float32, device=a_scale.device)
        with torch.autocast(a_scale.device.type, enabled=False):
            for k, start in enumerate(range(0, columns, step)):
                partial = a_elements[:, start : start + step] @ b_elements[:, start : start + step].mT
                out += partial.mul_(a_scale[:, k, None]).mul_(b_scale[None, :, k])
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
