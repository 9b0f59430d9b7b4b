"""Where a rank's part of a gradient lies in the whole: random bits belong to elements, and so to the whole's blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchao_blockwise.formats import NVFP4_1X16, Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_BLOCK = NVFP4_1X16.block[1]


def places_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Place, Place]:
    """The places of this rank's copies, rowwise and columnwise, of a gradient [.., N] of this shape.

    Raises ValueError where the rank's tokens are no run of all tokens, or begin inside a block of 16.
    """
    starts = starts_of(shape, mesh, placements)
    *leading, features = shape
    *outer, column = starts
    for dim, start in enumerate(outer):
        if start and math.prod(leading[:dim]) != 1:
            raise ValueError(
                f"linear: stochastic rounding numbers the tokens of all ranks one after the other, and a gradient "
                f"{list(shape)} that is split along dim {dim} has no run of them; split dim 0, or flatten the tokens"
            )
    token = sum(start * math.prod(leading[dim + 1 :]) for dim, start in enumerate(outer))
    for name, start in (("token", token), ("column", column)):
        if start % _BLOCK:
            raise ValueError(
                f"linear: stochastic rounding numbers blocks of {_BLOCK}, and a rank's part of a gradient "
                f"{list(shape)} begins with {name} {start}; split it at multiples of {_BLOCK}"
            )
    blocks, chunks = (-(-size // _BLOCK) for size in (features, math.prod(leading)))
    return Place(0, token, column // _BLOCK, blocks), Place(1, column, token // _BLOCK, chunks)


def starts_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The first index that this rank holds of each dim of a tensor of this shape; ranks hold chunks, the last less."""
    starts, sizes = [0] * len(shape), list(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank of the mesh"
    for i, placement in enumerate(placements):
        if placement.is_shard():
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]
            chunk = -(-sizes[dim] // mesh.size(i))
            first = min(coordinate[i] * chunk, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return starts
