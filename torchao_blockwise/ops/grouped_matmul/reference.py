"""Grouped products in eager torch: the plain reference, a group at a time. It reads the ends on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.groups import clamped_ends, padded_ends
from torchao_blockwise.ops.matmul import reference


def grouped_matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    group_ends: torch.Tensor,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    along: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Arguments and result as in the op; each group bit for bit as the plain reference multiplies it."""
    if along == "m":
        out = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
        for g, start, end in _groups(clamped_ends(group_ends, a.shape[0])):
            scale = a_scale[:, start:end] if a_fmt.transposed_scales else a_scale[start:end]
            rows = a[start:end], scale, a_global
            out[start:end] = reference.matmul(*rows, b[g], b_scale[g], b_global, a_fmt, b_fmt, out_dtype, None)
        return out
    out = a.new_zeros((group_ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)
    for g, x, y in _operands_along_k(a, a_scale, b, b_scale, group_ends, a_fmt, b_fmt):
        out[g] = reference.matmul(*x, a_global, *y, b_global, a_fmt, b_fmt, out_dtype, None)
    return out


def add_grouped_matmul(
    out: torch.Tensor, a, a_scale, a_global, b, b_scale, b_global, group_ends, a_fmt: BlockFormat, b_fmt: BlockFormat
) -> None:
    """out[g] += the product of group g, for groups that are not empty."""
    for g, x, y in _operands_along_k(a, a_scale, b, b_scale, group_ends, a_fmt, b_fmt):
        out[g] += reference.matmul(*x, a_global, *y, b_global, a_fmt, b_fmt, torch.float32, None)


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, start, end) of each group that is not empty."""
    start = 0
    for g, end in enumerate(ends.tolist()):
        if end > start:
            yield g, start, end
        start = end


_Part = tuple[torch.Tensor, torch.Tensor]


def _operands_along_k(
    a, a_scale, b, b_scale, group_ends, a_fmt: BlockFormat, b_fmt: BlockFormat
) -> Iterator[tuple[int, _Part, _Part]]:
    """(group, (payload, scale) of a and of b) of each group that is not empty: its columns, whole blocks of them."""
    per_byte, block = a_fmt.element.per_byte, a_fmt.block[1]
    tokens = a.shape[1] * per_byte
    for g, start, end in _groups(padded_ends(group_ends, tokens, block).clamp(max=tokens)):
        columns, blocks = slice(start // per_byte, end // per_byte), slice(start // block, end // block)

        def part(x, scale, fmt, columns=columns, blocks=blocks) -> _Part:
            return x[:, columns], scale[blocks] if fmt.transposed_scales else scale[:, blocks]

        yield g, part(a, a_scale, a_fmt), part(b, b_scale, b_fmt)
