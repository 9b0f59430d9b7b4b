"""Grouped products of FP8 operands on Hopper: the kernel of `ops/matmul/gluon_pipeline.py`, led by a schedule.

    along "m"   a [M, K]   b [E·N, K]   out [M, N]      tiles of rows that begin where groups do
    along "k"   a [N, P]   b [K, P]     out [E·N, K]    tiles of out[g], whose contraction is the tokens of group g

A tile's rows may run on into the next group, along "m" at the end of each group, along "k" where N is no multiple of
the tile. Whole waves leave by the copy engine, what such a tile has beyond them by masked stores: decided as a wave
ends, because only the device knows. Columns from N on are beside the output for both.
"""

import functools
from dataclasses import replace

import torch

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, BlockFormat
from torchao_blockwise.ops.backend import interpreting
from torchao_blockwise.ops.group_tables.kernels_triton import group_schedule, row_schedule
from torchao_blockwise.ops.group_tables.layout import count_rows
from torchao_blockwise.ops.launch import Launch, ceil_div
from torchao_blockwise.ops.matmul.builds import Build, builds_for, bytes_of_rounds
from torchao_blockwise.ops.matmul.gluon_pipeline import MAX_CTAS, WARPGROUP, grouped_matmul_fp8_kernel
from torchao_blockwise.ops.matmul.kernels_gluon import copies_out, in_tiles, multiprocessors, tiles_of
from torchao_blockwise.ops.matmul.rows import aligned_rows

_PAIRS = {"m": (FP8_1X128, FP8_128X128), "k": (FP8_1X128, FP8_1X128)}


def why_not(a_shape, b_shape, a_fmt: BlockFormat, b_fmt: BlockFormat, along: str) -> str | None:
    """Why these kernels cannot multiply payloads of these shapes on a Hopper GPU, or None if they can."""
    if interpreting():
        return "Triton's interpreter does not know Gluon"
    if (a_fmt, b_fmt) != _PAIRS[along]:
        wanted = " · ".join(fmt.name for fmt in _PAIRS[along])
        return f'along "{along}" the kernels multiply {wanted}, got {a_fmt.name} · {b_fmt.name}'
    if 0 in (*a_shape, *b_shape):
        return f"the copy engine has no empty tensors, got payloads of shape {list(a_shape)} and {list(b_shape)}"
    return None


@functools.lru_cache(maxsize=4096)
def choose_build(
    along: str, tokens: int, groups: int, m: int, n: int, k: int, available: int, max_ctas: int = MAX_CTAS
) -> Build:
    """The build whose programs should read the fewest bytes from the L2 cache, as for one product, of groups alike.

    The host knows how long groups are on average, and no more. Along "m" the last tile of a group is half empty on
    average, and read whole: what decides against high tiles where groups are short.
    tokens: of all groups. m, n, k: of the product, or of one group's, k along "k" on average.
    """
    filled = min(groups, tokens)

    def bytes_read(build: Build) -> float:
        tiles_m = tokens / build.tile_m + filled / 2 if along == "m" else groups * ceil_div(m, build.tile_m)
        return bytes_of_rounds(build, tiles_m * ceil_div(n, build.width), k, available)

    return min(builds_for(available, max_ctas), key=bytes_read)


def grouped_matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    group_ends: torch.Tensor,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    along: str,
    out_dtype: torch.dtype,
    build: Build | None = None,
    group_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """Product within what `why_not` admits. Arguments as in the op; build: the default is `choose_build`'s."""
    if along == "m":
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
        _launch_along_m(out, a, a_scale, b, b_scale, group_ends, a_fmt, build, group_tables)
    else:
        out = a.new_empty((group_ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)
        _launch_along_k(out, a, a_scale, b, b_scale, group_ends, a_fmt, False, build, group_tables)
    return out


def add_grouped_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    group_ends: torch.Tensor,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    build: Build | None = None,
    group_tables: torch.Tensor | None = None,
) -> None:
    """out [E, N, K] f32 += the groups' products, in the one pass that they take; empty groups are not touched."""
    _launch_along_k(out, a, a_scale, b, b_scale, group_ends, a_fmt, True, build, group_tables)


def _launch_along_m(out, a, a_scale, b, b_scale, group_ends, a_fmt, build, group_tables):
    (M, N), groups, block = out.shape, b.shape[0], a_fmt.block[1]
    available = multiprocessors(a.device)
    a, b = aligned_rows(a), aligned_rows(b.reshape(groups * N, -1))
    K = a.shape[1]
    build = choose_build("m", M, groups, M, N, K, available) if build is None else build
    copy_out = copies_out(N, out.dtype)
    build = _complete(build, block=block, along="m", b_square=True, copy_out=copy_out)
    schedule = row_schedule(group_ends, M, block, build.tile_m, group_tables)
    # As many as there may be: how many there are, the schedule says.
    tiles = count_rows(M, groups, build.tile_m) * ceil_div(N, build.width)
    _launch(a, a_scale, b, b_scale, schedule, out, out, (M, N, K), tiles, build)


def _launch_along_k(out, a, a_scale, b, b_scale, group_ends, a_fmt, accumulate, build, group_tables):
    groups, M, N = out.shape
    available, block = multiprocessors(a.device), a_fmt.block[1]
    padded = a.shape[1]
    mean = ceil_div(padded, groups * block) * block
    build = choose_build("k", padded, groups, M, N, mean, available) if build is None else build
    # The copy engine ends where the tensor does; a tile that runs on into the next group's rows is stored.
    copy_out = not accumulate and copies_out(N, out.dtype) and M % build.tile_m == 0
    build = _complete(build, block=block, along="k", accumulate=accumulate, copy_out=copy_out)
    schedule = group_schedule(group_ends, padded, block, group_tables)
    tiles = groups * ceil_div(M, build.tile_m) * ceil_div(N, build.width)
    operands = aligned_rows(a), a_scale, aligned_rows(b), b_scale
    _launch(*operands, schedule, out, out.view(groups * M, N), (M, N, padded), tiles, build)


def _launch(a, a_scale, b, b_scale, schedule, out, rows_of_out, sizes, programs, build):
    tiles = tiles_of(build)
    _launch_of(build, programs, sizes, multiprocessors(a.device))(
        grouped_matmul_fp8_kernel,
        *in_tiles(a, a_scale, b, b_scale, tiles),
        schedule,
        out if tiles.out is None else (rows_of_out, tiles.out),
        out,
    )


@functools.cache
def _complete(build: Build, **decided) -> Build:
    """`build` with what the operands decide: one object for each, made once and not in every launch (4 µs)."""
    return replace(build, **decided)


@functools.lru_cache(maxsize=4096)
def _launch_of(build: Build, programs: int, sizes: tuple[int, int, int], available: int) -> Launch:
    grid = min(programs, available // build.ctas)
    return Launch(grid, *sizes, B=build, num_warps=WARPGROUP, num_ctas=build.ctas)
