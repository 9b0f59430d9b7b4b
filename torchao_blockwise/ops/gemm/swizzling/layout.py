"""The tile of swizzled scales."""

from __future__ import annotations

TILE_ROWS, TILE_COLUMNS = 128, 4
# A tile's rows in the order of its bytes: each 16 bytes hold rows that lie so far apart.
ROWS_APART = 32
