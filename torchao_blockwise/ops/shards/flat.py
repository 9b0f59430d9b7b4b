"""Flat shards of tensors: the value that operations take, and the numbers of blocks and payload entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchao_blockwise.formats import BlockFormat, get_format


class Shard(NamedTuple):
    """One of `Shards`: the tensor's elements from `start` on, flat."""

    x: torch.Tensor
    start: int
    shape: tuple[int, int, int]  # of the tensor: (matrices, h, w)
    first_block: int


class Shards(NamedTuple):
    """A shard of each of a list of tensors, to be rounded to `dtype` and quantized in `fmt`."""

    tensors: list[torch.Tensor]
    starts: list[int]
    shapes: list[int]  # (matrices, h, w) of each tensor, one after the other
    first_blocks: list[int]  # the first block of each tensor in the buffer of all blocks
    dtype: torch.dtype
    fmt: BlockFormat

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        starts: Sequence[int],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        fmt: BlockFormat,
        first_blocks: Sequence[int] | None = None,
    ) -> Shards:
        """Create it for flat, contiguous shards [n] of tensors [.., h, w]; by default, blocks are in their order."""
        if first_blocks is None:
            first_blocks = list(itertools.accumulate((block_count(shape, fmt) for shape in shapes), initial=0))[:-1]
        for x, start, shape in zip(tensors, starts, shapes, strict=True):
            # Kernels would read and write outside the tensors.
            assert x.dim() == 1 and x.is_contiguous() and 0 <= start <= start + x.numel() <= math.prod(shape)
        flat = [size for *batch, rows, columns in shapes for size in (math.prod(batch), rows, columns)]
        return cls(list(tensors), list(starts), flat, list(first_blocks), dtype, fmt)

    def each(self) -> list[Shard]:
        shapes = zip(self.shapes[0::3], self.shapes[1::3], self.shapes[2::3])
        return list(map(Shard, self.tensors, self.starts, shapes, self.first_blocks))


def block_count(shape: Sequence[int], fmt: BlockFormat) -> int:
    """Blocks of a tensor [.., h, w]: leading dims · ⌈h/R⌉ · ⌈w/C⌉."""
    *batch, rows, columns = shape
    return math.prod((*batch, *fmt.grid(rows, columns)))


def shard_entries(start: int, n: int, columns: int, fmt: BlockFormat | str) -> tuple[int, int]:
    """Return (first, count) of the payload entries of a tensor with its elements [start, start + n).

    columns: w of the tensor [.., h, w]. A 4-bit shard may share its first and its last entry with its neighbors.
    """
    element = get_format(fmt).element
    if n == 0:
        return 0, 0
    first, last = (
        flat // columns * element.packed(columns) + flat % columns // element.per_byte
        for flat in (start, start + n - 1)
    )
    return first, last - first + 1


def cuts_no_block(start: int, n: int, shape: Sequence[int], fmt: BlockFormat) -> bool:
    """Whether the elements [start, start + n) of a tensor [.., h, w] consist of whole blocks."""
    *_, rows, columns = shape
    if n == 0:
        return True
    return all(edge % columns == 0 and edge // columns % rows % fmt.block[0] == 0 for edge in (start, start + n))
