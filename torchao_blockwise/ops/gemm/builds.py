"""The builds of the Hopper kernel, and how one is chosen for a GEMM."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from torchao_blockwise.ops.launch import ceil_div

# Rows of a wgmma, and so of the tiles that the copy engine moves.
WAVE_ROWS = 64
# Bytes of a row of a stage: the widest swizzle of shared memory, which is also a block of K in FP8.
STAGE_BYTES = 128
# Tokens whose scales take 16 bytes, the alignment of TMA.
TOKEN_ALIGNMENT = 4
# int32 fields of an entry of a schedule of groups. The first entry is the header.
SCHEDULE_FIELDS = 4


@dataclass(frozen=True, eq=False)
class Build:
    """The constants of a build of the kernel, most of them chosen by the launcher."""

    tile_n: int  # columns of a tile
    consumers: int  # warpgroups that multiply
    waves: int  # waves of 64 rows of a consumer: 1 or 2
    stages: int
    group: int  # rows of tiles that are computed at the same time, to share tiles of b in the L2 cache
    block: int = 0  # of K: the block of FP8 scales; along "k", groups start at its multiples
    splits: int = 1  # of K; their results are added afterwards
    along: str = ""  # the dim of groups of tokens: "m" for rows of a, "k" for the contraction, "" for no groups
    decoded: bool = False  # operands are bf16 with only tensor scales, instead of FP8
    per_group: bool = False  # decoded operands: each group has a scale
    b_square: bool = False
    copy_out: bool = False  # whole tiles are written through shared memory and TMA
    accumulate: bool = False
    has_bias: bool = False

    @property
    def all_waves(self) -> int:
        return self.consumers * self.waves

    @property
    def tile_m(self) -> int:
        return self.all_waves * WAVE_ROWS

    @property
    def copies(self) -> int:
        """TMA copies of a tile of a. On an H200, one is faster along "k", and one for each wave otherwise."""
        return 1 if self.along == "k" else self.all_waves

    @property
    def copied_rows(self) -> int:
        return self.tile_m // self.copies

    @property
    def all_live(self) -> bool:
        """Whether every wave is multiplied. With groups, a wave entirely after its group is not."""
        return not self.along or self.all_waves == 1 or (self.along == "k" and self.copy_out)

    @property
    def stride(self) -> int:
        """Distance between the waves of a consumer. Consumers alternate, so that both work on a half-used tile."""
        return 1 if self.all_live else self.consumers

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a and b."""
        return 2 if self.decoded else 1

    @property
    def stage_blocks(self) -> int:
        """Blocks of K in a stage."""
        return STAGE_BYTES // (self.block * self.itemsize)

    @property
    def depth(self) -> int:
        """Columns of a and b in a stage."""
        return self.stage_blocks * self.block

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied into a stage."""
        payload = (self.tile_m + self.tile_n) * self.depth * self.itemsize
        scales = 0 if self.decoded else self.tile_m + (0 if self.b_square else self.tile_n)
        return payload + scales * 4


# `replace`, with one object for equal constants, because launches tell builds apart by identity.
complete = functools.cache(replace)

BUILDS = (
    Build(tile_n=128, consumers=2, waves=2, stages=3, group=4),
    Build(tile_n=128, consumers=2, waves=1, stages=5, group=8),
    # Few rows: limited by reading b from memory, which needs many stages in flight and many programs.
    Build(tile_n=64, consumers=1, waves=1, stages=8, group=1),
)
# The cost of a second launch, 4 µs, as the bytes that a multiprocessor reads in this time.
_SPLIT_BYTES = 200_000


@functools.lru_cache(maxsize=4096)
def choose_build(m: int, n: int, k: int, block: int, multiprocessors: int, along: str = "", groups: int = 1) -> Build:
    """Return the build whose programs should read the fewest bytes, one after the other, from the L2 cache.

    A tile reads (tile_m + tile_n) · K bytes; programs compute tiles in rounds. Splitting K fills rounds with few tiles,
    but costs a launch, and a write and a read of the fp32 result of each split.

    m, n, k: of the GEMM; along "m", m is the number of tokens of all groups, and along "k", k is that of a mean group.
    The host knows only the mean length of groups. Along "m", the last tile of a group is half empty on average, but
    read entirely, so high tiles are bad for short groups.
    """
    blocks = ceil_div(k, block)

    def bytes_read(build: Build) -> float:
        rows = m / build.tile_m + min(groups, m) / 2 if along == "m" else groups * ceil_div(m, build.tile_m)
        rounds = math.ceil(rows * ceil_div(n, build.tile_n) * build.splits / multiprocessors)
        read = rounds * (build.tile_m + build.tile_n) * ceil_div(blocks, build.splits) * block
        return read + (build.splits > 1) * (_SPLIT_BYTES + build.splits * m * n * 8 / multiprocessors)

    splits = () if along else (2, 4, 8)
    split = (complete(b, splits=s) for b in BUILDS for s in splits if 2 * s <= blocks)
    return min((*BUILDS, *split), key=bytes_read)
