"""The builds of the Hopper kernel, and the choice of one for a GEMM."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from torchao_blockwise.ops.launch import ceil_div

# Rows of a wgmma, and so of the tiles that the copy engine moves.
WAVE_ROWS = 64
# Of a row of a stage: the widest swizzle of shared memory, which is also a block of K in FP8.
STAGE_BYTES = 128
# Tokens of 16 bytes of scales, which is where the copy engine can begin.
TOKEN_ALIGNMENT = 4
# int32 fields of an entry of a schedule of groups, of which the first is its header.
SCHEDULE_FIELDS = 4


@dataclass(frozen=True)
class Build:
    """The constants of a build of the kernel, most of them chosen by the launcher."""

    tile_n: int  # columns of a multiprocessor
    consumers: int  # warpgroups that multiply
    waves: int  # of 64 rows, that a consumer takes in turn: 1 or 2
    stages: int
    group: int  # rows of tiles whose programs run side by side and share tiles of b in the L2 cache
    block: int = 0  # of K: where groups begin along "k", and what FP8 is scaled by
    splits: int = 1  # of K; their results are added afterwards
    along: str = ""  # where groups of tokens lie: "m" for rows of a, "k" for the contraction, "" for no groups
    decoded: bool = False  # bf16 that needs no scales but those of whole tensors, instead of FP8
    per_group: bool = False  # of decoded operands: each group has a scale
    b_square: bool = False
    copy_out: bool = False  # whole tiles leave through shared memory and the copy engine
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
        """By how many copies the rows of a tile of a come. On an H200 one is faster along "k", and one a wave else."""
        return 1 if self.along == "k" else self.all_waves

    @property
    def copied_rows(self) -> int:
        return self.tile_m // self.copies

    @property
    def all_live(self) -> bool:
        """Whether every wave is multiplied. With groups, one that lies wholly beyond its group is not."""
        return not self.along or self.all_waves == 1 or (self.along == "k" and self.copy_out)

    @property
    def stride(self) -> int:
        """Waves from one of a consumer to its next: they take turns, so that both have work in a tile half used."""
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


BUILDS = (
    Build(tile_n=128, consumers=2, waves=2, stages=3, group=4),
    Build(tile_n=128, consumers=2, waves=1, stages=5, group=8),
    # Few rows: bound by reading b from memory, which takes many stages in flight and many programs.
    Build(tile_n=64, consumers=1, waves=1, stages=8, group=1),
)
# The cost of a second launch, 4 µs, in bytes that a multiprocessor reads in that time.
_SPLIT_BYTES = 200_000


@functools.lru_cache(maxsize=4096)
def choose_build(m: int, n: int, k: int, block: int, multiprocessors: int, along: str = "", groups: int = 1) -> Build:
    """The build whose programs should read the fewest bytes, one after the other, from the L2 cache.

    A tile reads (tile_m + tile_n) · K bytes; programs take tiles in rounds. Splitting K fills rounds that few tiles
    leave empty, and costs a launch and a write and a read of each split's fp32 result.

    m, n, k: of the GEMM; along "m" m counts the tokens of all groups, along "k" k is a group's mean. The host knows
    how long groups are on average, and no more. Along "m" the last tile of a group is half empty on average, and read
    whole: what decides against high tiles where groups are short.
    """
    blocks = ceil_div(k, block)

    def bytes_read(build: Build) -> float:
        rows = m / build.tile_m + min(groups, m) / 2 if along == "m" else groups * ceil_div(m, build.tile_m)
        rounds = math.ceil(rows * ceil_div(n, build.tile_n) * build.splits / multiprocessors)
        read = rounds * (build.tile_m + build.tile_n) * ceil_div(blocks, build.splits) * block
        return read + (build.splits > 1) * (_SPLIT_BYTES + build.splits * m * n * 8 / multiprocessors)

    splits = (1,) if along else (1, 2, 4, 8)
    return min((replace(b, splits=s) for b in BUILDS for s in splits if s == 1 or 2 * s <= blocks), key=bytes_read)
