"""The tile of swizzled scales, and how many of them there are."""

from __future__ import annotations

TILE_ROWS, TILE_COLUMNS = 128, 4
TILE_BYTES = TILE_ROWS * TILE_COLUMNS
# A tile's rows in the order of its bytes: each 16 bytes hold rows that lie so far apart.
ROWS_APART = 32


def tiles_along(size: int, tile: int) -> int:
    """⌈size / tile⌉."""
    return -(-size // tile)
