"""Flat shards of tensors: the value that they travel as, their blocks and payload entries, what callers must give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, get_format
from torchao_blockwise.ops.registry import by_name

# Where `partial_cast_` writes: the whole payload, the entries that hold the shard, or one code an entry.
WHOLE, ENTRIES, CODES = "whole", "entries", "codes"


class Shard(NamedTuple):
    """One of `Shards`: the tensor's elements from `start` on, flat."""

    x: torch.Tensor
    start: int
    shape: tuple[int, int, int]  # of the tensor: (matrices, h, w)
    first_block: int


@by_name(fmt=BlockFormat)
class Shards(NamedTuple):
    """A shard of each of a list of tensors, to be rounded to `dtype` and quantized in `fmt`."""

    tensors: list[torch.Tensor]
    starts: list[int]
    shapes: list[int]  # (matrices, h, w) of each tensor, one after the other
    first_blocks: list[int]  # where each tensor's blocks begin in what holds those of the list
    dtype: torch.dtype
    fmt: BlockFormat

    def each(self) -> list[Shard]:
        shapes = zip(self.shapes[0::3], self.shapes[1::3], self.shapes[2::3])
        return list(map(Shard, self.tensors, self.starts, shapes, self.first_blocks))


def block_count(shape: Sequence[int], fmt: BlockFormat | str) -> int:
    """Blocks of a tensor [.., h, w]: leading dims · ⌈h/R⌉ · ⌈w/C⌉."""
    *batch, rows, columns = shape
    return math.prod((*batch, *get_format(fmt).grid(rows, columns)))


def shard_entries(start: int, n: int, columns: int, fmt: BlockFormat | str) -> tuple[int, int]:
    """(first, count) of the payload entries, numbered through the tensor, that hold its elements [start, start + n).

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
    """Whether the elements [start, start + n) of a tensor [.., h, w] hold all of each block that they touch."""
    *_, rows, columns = shape
    if n == 0:
        return True
    return all(edge % columns == 0 and edge // columns % rows % fmt.block[0] == 0 for edge in (start, start + n))


def target_size(n: int, start: int, shape: Sequence[int], fmt: BlockFormat, into: str) -> int:
    """Bytes of what `partial_cast_` writes to."""
    if into == WHOLE:
        return math.prod(fmt.qdata_shape(*shape))
    return shard_entries(start, n, shape[-1], fmt)[1] if into == ENTRIES else n


def described(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" + ("" if x.is_contiguous() else ", not contiguous")


def entries_of(shards: Shards, into: str) -> tuple[list[int], bool]:
    """(the payload entry that each of `partial_cast_`'s targets begins with, whether entries hold several elements)."""
    element = shards.fmt.element
    packed = into != CODES and element.per_byte > 1
    if into == WHOLE:
        return [0] * len(shards.starts), packed
    if not packed:
        return shards.starts, packed
    return [shard_entries(x.start, x.x.numel(), x.shape[-1], shards.fmt)[0] for x in shards.each()], packed


def place_blocks(op: str, counts: list[int], first_blocks: Sequence[int] | None) -> tuple[list[int], int]:
    """(where each tensor's blocks begin, blocks that a buffer must have)."""
    if first_blocks is None:
        ends = list(itertools.accumulate(counts))
        return [end - count for end, count in zip(ends, counts)], ends[-1] if ends else 0
    if len(first_blocks) != len(counts):
        raise ValueError(f"{op}: {len(counts)} tensors need as many first_blocks, got {len(first_blocks)}")
    return list(first_blocks), max((first + count for first, count in zip(first_blocks, counts)), default=0)


def check_shards(
    op: str,
    tensors: Sequence[torch.Tensor],
    starts: Sequence[int],
    shapes: Sequence[Sequence[int]],
    first_blocks: Sequence[int] | None,
    dtype: torch.dtype,
    fmt: BlockFormat,
) -> tuple[Shards, int]:
    """(the shards, blocks that a buffer must have); raises as `partial_block_amax` says."""
    for shape in shapes:
        if len(shape) < 2:
            raise ValueError(f"{op}: shapes must be [.., h, w], got {list(shape)}")
    places, total = place_blocks(op, [block_count(shape, fmt) for shape in shapes], first_blocks)
    if not len(tensors) == len(starts) == len(shapes):
        sizes = [len(x) for x in (tensors, starts, shapes)]
        raise ValueError(f"{op}: shards, starts and shapes must be as many, got {sizes}")
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: dtype must be bfloat16, float16 or float32, got {dtype}")
    for x, start, shape in zip(tensors, starts, shapes):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{op}: a shard must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
        if x.dim() != 1 or not x.is_contiguous():
            raise ValueError(f"{op}: a shard must be flat and contiguous, got {described(x)}; flatten it")
        if not 0 <= start <= start + x.numel() <= math.prod(shape):
            got = f"elements [{start}, {start + x.numel()})"
            raise ValueError(f"{op}: {got} do not lie in a tensor of shape {list(shape)}")
    flat = [size for *batch, rows, columns in shapes for size in (math.prod(batch), rows, columns)]
    return Shards([x.detach() for x in tensors], list(starts), flat, places, dtype, fmt), total


def check_buffer(op: str, name: str, buffer: torch.Tensor, dtype: torch.dtype, blocks: int) -> None:
    if buffer.dtype != dtype or buffer.dim() != 1 or buffer.numel() < blocks or not buffer.is_contiguous():
        raise ValueError(f"{op}: {name} must be {dtype} of at least {blocks} blocks, got {described(buffer)}")


def check_devices(op: str, tensors: Sequence[torch.Tensor]) -> None:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")


def flat_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as flat uint8 tensors, of contiguous tensors of 1-byte elements."""
    return [x.view(torch.uint8).view(-1) for x in tensors]
