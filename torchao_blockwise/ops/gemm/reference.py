"""NT GEMMs of quantized operands in eager torch, generic over `BlockFormat`: plain, and a group at a time.

Ends of groups are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_ends
from torchao_blockwise.ops.quantization.reference import expand_blocks


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Σ over blocks k of (a_k · b_kᵀ) · scale_a · scale_b, in fp32, then · global scales, + bias, rounded once.

    a: [M, packed(K)], b: [N, packed(K)] -> [M, N]. In NVFP4, whose blocks are short, block scales are applied to the
    elements first: an e2m1 element times an e4m3 scale is exact in fp32, so the result is the same.
    """
    a_fmt, b_fmt = a.format, b.format
    columns = min(a.qdata.shape[1], b.qdata.shape[1]) * a_fmt.element.per_byte
    a_elements, b_elements = a_fmt.element.decode(a.qdata, columns), b_fmt.element.decode(b.qdata, columns)
    a_scale = a.scale.float().mT if a_fmt.transposed_scales else a.scale.float()
    b_scale = b.scale.float().mT if b_fmt.transposed_scales else b.scale.float()
    if a.global_scale is not None and b.global_scale is not None:
        a_elements = a_elements * expand_blocks(a_scale, a_fmt, *a_elements.shape)
        b_elements = b_elements * expand_blocks(b_scale, b_fmt, *b_elements.shape)
        # Autocast would redo this GEMM in half precision.
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


def grouped_matmul(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Arguments and result as in the op; each group is bitwise identical to a plain `matmul`."""
    rows, columns = a.qdata.shape[0], b.qdata.shape[-2]
    if along == "m":
        out = a.qdata.new_zeros((rows, columns), dtype=out_dtype)
        for g, start, end in _groups(clamped_ends(groups.ends, rows)):
            scale = a.scale[:, start:end] if a.format.transposed_scales else a.scale[start:end]
            tokens = a._replace(qdata=a.qdata[start:end], scale=scale, global_scale=_of_group(a, g))
            expert = b._replace(qdata=b.qdata[g], scale=b.scale[g], global_scale=_of_group(b, g))
            out[start:end] = matmul(tokens, expert, out_dtype)
        return out
    out = a.qdata.new_zeros((groups.ends.shape[0], rows, columns), dtype=out_dtype)
    for g, x, y in _operands_along_k(a, b, groups):
        out[g] = matmul(x, y, out_dtype)
    return out


def add_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups) -> None:
    """out[g] += the GEMM of group g, for groups that are not empty."""
    for g, x, y in _operands_along_k(a, b, groups):
        out[g] += matmul(x, y, torch.float32)


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, start, end) of each group that is not empty."""
    start = 0
    for g, end in enumerate(ends.tolist()):
        if end > start:
            yield g, start, end
        start = end


def _of_group(x: Operand, group: int) -> torch.Tensor | None:
    """Return the tensor scale of a group, or that of the whole tensor."""
    return x.global_scale[group] if x.global_scale is not None and x.global_scale.dim() else x.global_scale


def _operands_along_k(a: Operand, b: Operand, groups: Groups) -> Iterator[tuple[int, Operand, Operand]]:
    """(group, its columns of a, its columns of b) of each group that is not empty, in whole blocks."""
    per_byte, block = a.format.element.per_byte, a.format.block[1]
    tokens = a.qdata.shape[1] * per_byte
    for g, start, end in _groups(padded_ends(groups.ends, tokens, block).clamp(max=tokens)):
        columns, blocks = slice(start // per_byte, end // per_byte), slice(start // block, end // block)
        scales = (x.scale[blocks] if x.format.transposed_scales else x.scale[:, blocks] for x in (a, b))
        x, y = (
            x._replace(qdata=x.qdata[:, columns], scale=scale, global_scale=_of_group(x, g))
            for x, scale in zip((a, b), scales)
        )
        yield g, x, y
