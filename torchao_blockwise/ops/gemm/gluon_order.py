"""The order in which persistent programs of `gluon_pipeline.py` compute tiles, and the position of each tile.

Without groups (B.along == ""), a program computes every num_programs-th tile. With groups, a schedule in device memory
(ops/groups/tables) lists rows of tiles, or groups, and the direction alternates between rounds:

    programs    0   1   2   3          tiles differ in length: the program with the longest one in a round has the
    round 0     0   1   2   3          shortest one in the next
    round 1     7   6   5   4
    round 2     8   9
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.ops.gemm.builds import SCHEDULE_FIELDS, TOKEN_ALIGNMENT

_FIELDS: gl.constexpr = gl.constexpr(SCHEDULE_FIELDS)
_ALIGNMENT: gl.constexpr = gl.constexpr(TOKEN_ALIGNMENT)


@gluon.jit
def _reciprocal(x):
    """1 / x of an f32, with an error of one ulp."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _divided(x, by, B: gl.constexpr):
    """(x // by, x % by) for 0 <= x < 2^24, more tiles than fit in memory.

    With groups, which have many short tiles, an estimated reciprocal takes a third of the instructions of an integer
    division. Without groups, it made kernels up to 8 % slower on an H200.
    """
    if B.along == "":
        quotient = x // by
        rest = x % by
    else:
        quotient = (x.to(gl.float32) * _reciprocal(gl.to_tensor(by).to(gl.float32))).to(gl.int32)
        rest = x - quotient * by
        # The estimate differs by at most one.
        missed = (rest >= by).to(gl.int32) - (rest < 0).to(gl.int32)
        quotient, rest = quotient + missed, rest - missed * by
    return quotient, rest


@gluon.jit
def turns_of_program(groups, M, N, B: gl.constexpr):
    """(first, end, step) of the turns of this program, and the number of entries of the schedule."""
    if B.along == "":
        tiles = gl.cdiv(M, B.tile_m) * gl.cdiv(N, B.tile_n) * B.splits
        return gl.program_id(0), tiles, gl.num_programs(0), 0
    else:
        entries = gl.load(groups[0] + (1 if B.accumulate else 0))
        tiles = entries * _tiles_of_entry(M, N, B)
        rounds = tiles // gl.num_programs(0)
        return 0, rounds + (_tile_of(rounds) < tiles).to(gl.int32), 1, entries


@gluon.jit
def _tile_of(turn):
    """The tile of this program in a turn."""
    back = gl.num_programs(0) - 1 - gl.program_id(0)
    return turn * gl.num_programs(0) + gl.where(turn % 2 == 0, gl.program_id(0), back)


@gluon.jit
def _tiles_of_entry(M, N, B: gl.constexpr):
    if B.along == "m":
        return gl.cdiv(N, B.tile_n)
    else:
        return gl.cdiv(M, B.tile_m) * gl.cdiv(N, B.tile_n)


@gluon.jit
def load_entry(turn, entries, groups, M, N, B: gl.constexpr):
    """The schedule's entry of a tile, or any entry if the tile does not exist.

    "m"   an entry for each row of tiles: group, the group's first row of tiles, its first token, its end
    "k"   an entry for each group, the longest first: group, its first block, its last block and one, 0
    """
    if B.along == "":
        return ()
    else:
        index, _ = _divided(_tile_of(turn), _tiles_of_entry(M, N, B), B)
        entry = groups[0] + _FIELDS * gl.minimum(1 + index, entries)
        return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def locate_tile(tile, entry, M, N, K, B: gl.constexpr):
    """(part, row, start, end, column, first, last) of a tile, or turn; B.group rows of tiles, column by column.

    part: the split of K, or the group. row, column: the start of the tile in an output of N columns; only rows `start`
    to `end` belong to it. first, last: its blocks of K, without the last.
    """
    tiles_m, tiles_n, blocks = gl.cdiv(M, B.tile_m), gl.cdiv(N, B.tile_n), gl.cdiv(K, B.block)
    start, begin, end = 0, 0, M
    if B.along == "m":
        part, first_row, start, end = entry
        # A schedule made for more tokens must not lead outside the tensor.
        end = gl.minimum(end, M)
        tile = _tile_of(tile) - first_row * tiles_n
        begin = start // _ALIGNMENT * _ALIGNMENT
        tiles_m = gl.cdiv(end - begin, B.tile_m)
    elif B.along == "k":
        part, first, last, _ = entry
        _, tile = _divided(_tile_of(tile), tiles_m * tiles_n, B)
    else:
        part, tile = _divided(tile, tiles_m * tiles_n, B)
    band, in_band = _divided(tile, B.group * tiles_n, B)
    first_m = band * B.group
    column, tile_row = _divided(in_band, gl.minimum(tiles_m - first_m, B.group), B)
    if B.along == "m":
        # Tokens after the last group, -1, have no GEMM.
        first, last = 0, gl.where(part < 0, 0, blocks)
    elif B.along == "":
        share = gl.cdiv(blocks, B.splits)
        first, last = part * share, gl.minimum((part + 1) * share, blocks)
    row = begin + (first_m + tile_row) * B.tile_m
    return part, row, start, end, column * B.tile_n, first, last
