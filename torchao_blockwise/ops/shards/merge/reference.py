"""The merge of gathered shards in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import itertools

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.shards.flat import flat_bytes
from torchao_blockwise.ops.shards.partial_cast.reference import places_of, write_codes_


def merge_shards_(
    targets: list[torch.Tensor],
    shards: list[torch.Tensor],
    starts: list[int],
    lengths: list[int],
    pieces: list[int],
    columns: list[int],
    fmt: BlockFormat,
) -> None:
    """Write the elements that each shard owns to the bytes of its payload. Arguments as in the op."""
    each = iter(zip(flat_bytes(shards), starts, lengths))
    for target, count, width in zip(flat_bytes(targets), pieces, columns):
        for shard, start, n in itertools.islice(each, count):
            if n:
                write_codes_(target, read_codes(shard, start, n, width, fmt), start, width, fmt, 0)


def read_codes(source: torch.Tensor, start: int, n: int, columns: int, fmt: BlockFormat) -> torch.Tensor:
    """One code an entry [n] of the elements [start, start + n), from bytes that begin with the first one's."""
    entries, position = places_of(start, n, columns, fmt, source.device)
    mask = (1 << fmt.element.bits) - 1
    return (source[entries - entries[:1]] >> (position * fmt.element.bits).to(torch.uint8)) & mask
