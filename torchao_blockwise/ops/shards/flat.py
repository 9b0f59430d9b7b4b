"""Where a flat shard of a tensor lies: its blocks, its payload entries, and what callers must give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, get_format

# Where `partial_cast_` writes: the whole payload, the entries that hold the shard, or one code an entry.
WHOLE, ENTRIES, CODES = "whole", "entries", "codes"


def block_count(shape: Sequence[int], fmt: BlockFormat | str) -> int:
    """Blocks of a tensor [.., h, w]: leading dims · ⌈h/R⌉ · ⌈w/C⌉."""
    *batch, rows, columns = shape
    return math.prod((*batch, *get_format(fmt).grid(rows, columns)))


def shard_entries(start: int, n: int, columns: int, fmt: BlockFormat | str) -> tuple[int, int]:
    """(first, count) of the payload entries, numbered through the tensor, that hold its elements [start, start + n).

    columns: w of the tensor [.., h, w]. A 4-bit shard may share its first and its last entry with its neighbours.
    """
    element = get_format(fmt).element
    if n == 0:
        return 0, 0
    first, last = (
        flat // columns * element.packed(columns) + flat % columns // element.per_byte
        for flat in (start, start + n - 1)
    )
    return first, last - first + 1


def target_size(n: int, start: int, shape: Sequence[int], fmt: BlockFormat, into: str) -> int:
    """Bytes of what `partial_cast_` writes to."""
    if into == WHOLE:
        return math.prod(fmt.qdata_shape(*shape))
    return shard_entries(start, n, shape[-1], fmt)[1] if into == ENTRIES else n


def described(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" + ("" if x.is_contiguous() else ", not contiguous")


def flat_shapes(shapes) -> list[int]:
    """(matrices, h, w) of each shape, one after the other."""
    return [size for *batch, rows, columns in shapes for size in (math.prod(batch), rows, columns)]


def shapes_of(flat: list[int]) -> list[tuple[int, int, int]]:
    """The (matrices, h, w) that `flat_shapes` put one after the other."""
    return list(zip(flat[0::3], flat[1::3], flat[2::3]))


def entries_of(shards, starts, shapes, into: str, fmt: BlockFormat) -> tuple[list[int], bool]:
    """(the payload entry that each of `partial_cast_`'s targets begins with, whether entries hold several elements)."""
    packed = into != CODES and fmt.element.per_byte > 1
    if into == WHOLE:
        return [0] * len(starts), packed
    if not packed:
        return list(starts), packed
    return [
        shard_entries(start, x.numel(), shape[-1], fmt)[0] for start, x, shape in zip(starts, shards, shapes)
    ], packed


def check_blocks(op: str, shapes, fmt: BlockFormat, first_blocks) -> tuple[list[int], int]:
    for shape in shapes:
        if len(shape) < 2:
            raise ValueError(f"{op}: shapes must be [.., h, w], got {list(shape)}")
    return place_blocks(op, [block_count(shape, fmt) for shape in shapes], first_blocks)


def place_blocks(op: str, counts: list[int], first_blocks) -> tuple[list[int], int]:
    """(where each tensor's blocks begin, blocks that a buffer must have)."""
    if first_blocks is None:
        ends = list(itertools.accumulate(counts))
        return [end - count for end, count in zip(ends, counts)], ends[-1] if ends else 0
    if len(first_blocks) != len(counts):
        raise ValueError(f"{op}: {len(counts)} tensors need as many first_blocks, got {len(first_blocks)}")
    return list(first_blocks), max((first + count for first, count in zip(first_blocks, counts)), default=0)


def check_shards(op: str, shards, starts, shapes, dtype) -> None:
    if not len(shards) == len(starts) == len(shapes):
        sizes = [len(x) for x in (shards, starts, shapes)]
        raise ValueError(f"{op}: shards, starts and shapes must be as many, got {sizes}")
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: dtype must be bfloat16, float16 or float32, got {dtype}")
    for shard, start, shape in zip(shards, starts, shapes):
        if shard.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{op}: a shard must be bfloat16, float16 or float32, got {shard.dtype}; cast it first")
        if shard.dim() != 1 or not shard.is_contiguous():
            raise ValueError(f"{op}: a shard must be flat and contiguous, got {described(shard)}; flatten it")
        if not 0 <= start <= start + shard.numel() <= math.prod(shape):
            raise ValueError(
                f"{op}: elements [{start}, {start + shard.numel()}) do not lie in a tensor of shape {list(shape)}"
            )


def check_buffer(op: str, name: str, buffer: torch.Tensor, dtype: torch.dtype, blocks: int) -> None:
    if buffer.dtype != dtype or buffer.dim() != 1 or buffer.numel() < blocks or not buffer.is_contiguous():
        raise ValueError(f"{op}: {name} must be {dtype} of at least {blocks} blocks, got {described(buffer)}")


def check_devices(op: str, tensors) -> None:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")


def flat_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as flat uint8 tensors, of contiguous tensors of 1-byte elements."""
    return [x.view(torch.uint8).view(-1) for x in tensors]
