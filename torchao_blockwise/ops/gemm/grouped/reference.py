"""Grouped products in eager torch: the plain reference, a group at a time. It reads the ends on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchao_blockwise.formats import Groups, Operand
from torchao_blockwise.ops.gemm.plain import reference
from torchao_blockwise.ops.groups.ends import clamped_ends, padded_ends


def grouped_matmul(a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Arguments and result as in the op; each group bit for bit as the plain reference multiplies it."""
    rows, columns = a.qdata.shape[0], b.qdata.shape[-2]
    if along == "m":
        out = a.qdata.new_zeros((rows, columns), dtype=out_dtype)
        for g, start, end in _groups(clamped_ends(groups.ends, rows)):
            scale = a.scale[:, start:end] if a.format.transposed_scales else a.scale[start:end]
            tokens = a._replace(qdata=a.qdata[start:end], scale=scale, global_scale=_of_group(a, g))
            expert = b._replace(qdata=b.qdata[g], scale=b.scale[g], global_scale=_of_group(b, g))
            out[start:end] = reference.matmul(tokens, expert, out_dtype, None)
        return out
    out = a.qdata.new_zeros((groups.ends.shape[0], rows, columns), dtype=out_dtype)
    for g, x, y in _operands_along_k(a, b, groups):
        out[g] = reference.matmul(x, y, out_dtype, None)
    return out


def add_grouped_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups) -> None:
    """out[g] += the product of group g, for groups that are not empty."""
    for g, x, y in _operands_along_k(a, b, groups):
        out[g] += reference.matmul(x, y, torch.float32, None)


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, start, end) of each group that is not empty."""
    start = 0
    for g, end in enumerate(ends.tolist()):
        if end > start:
            yield g, start, end
        start = end


def _of_group(x: Operand, group: int) -> torch.Tensor | None:
    """The tensor scale of a group: its own, or that of all."""
    return x.global_scale[group] if x.global_scale is not None and x.global_scale.dim() else x.global_scale


def _operands_along_k(a: Operand, b: Operand, groups: Groups) -> Iterator[tuple[int, Operand, Operand]]:
    """(group, its part of a, of b) of each group that is not empty: its columns, whole blocks of them."""
    per_byte, block = a.format.element.per_byte, a.format.block[1]
    tokens = a.qdata.shape[1] * per_byte
    for g, start, end in _groups(padded_ends(groups.ends, tokens, block).clamp(max=tokens)):
        columns, blocks = slice(start // per_byte, end // per_byte), slice(start // block, end // block)

        def part(x: Operand, g: int = g, columns: slice = columns, blocks: slice = blocks) -> Operand:
            scale = x.scale[blocks] if x.format.transposed_scales else x.scale[:, blocks]
            return x._replace(qdata=x.qdata[:, columns], scale=scale, global_scale=_of_group(x, g))

        yield g, part(a), part(b)
