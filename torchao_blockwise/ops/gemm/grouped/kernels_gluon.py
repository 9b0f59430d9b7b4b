"""Grouped products on Hopper: the kernels of `ops/gemm/gluon_pipeline.py`, led by a schedule.

    along "m"   a [M, K]   b [E·N, K]   out [M, N]      tiles of rows that begin where groups do
    along "k"   a [N, P]   b [K, P]     out [E·N, K]    tiles of out[g], whose contraction is the tokens of group g

A tile's rows may run on into the next group, along "m" at the end of each group, along "k" where N is no multiple of
the tile. Whole waves leave by the copy engine, what such a tile has beyond them by masked stores: decided as a wave
ends, because only the device knows. Columns from N on are beside the output for both.

Hopper has no FP4 tensor cores, so NVFP4 operands are decoded to bf16 first, then multiplied in bf16:

    a, b  4 bits ──decode──▶ bf16, exact ──Gluon, by groups──▶ Σ in fp32 · both tensor scales ──▶ out, rounded once

An element times its block scale has six significant bits, so bf16 holds it. Both operands in bf16, 2 bytes an element,
live for this product alone: for weights of experts as much as a copy of them in high precision. PyTorch's grouped
product in bf16 would not do: it rounds before the tensor scales could be applied.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from torchao_blockwise.formats import E2M1, BlockFormat, Groups, Operand
from torchao_blockwise.ops.gemm.builds import Build, builds_for, bytes_of_rounds
from torchao_blockwise.ops.gemm.gluon_pipeline import (
    MAX_CTAS,
    grouped_matmul_bf16_kernel,
    grouped_matmul_fp8_kernel,
)
from torchao_blockwise.ops.gemm.gluon_ring import WARPGROUP
from torchao_blockwise.ops.gemm.plain.kernels_decode import decode
from torchao_blockwise.ops.gemm.plain.kernels_gluon import copies_out, in_tiles, multiprocessors, tiles_of
from torchao_blockwise.ops.gemm.rows import aligned_rows
from torchao_blockwise.ops.groups.tables.kernels_triton import group_schedule, row_schedule
from torchao_blockwise.ops.groups.tables.layout import count_rows
from torchao_blockwise.ops.launch import ceil_div, launch


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


class Factors(NamedTuple):
    """What a product multiplies: matrices of aligned rows, and what scales them.

    Payload and the scales of its blocks; or what they decode to, in bf16, and the tensor scales, or for both the
    products of both, [E], where each group has its own.
    """

    a: torch.Tensor  # [M, K]
    a_scale: torch.Tensor
    b: torch.Tensor  # along "m" [E·N, K], else [N, K]
    b_scale: torch.Tensor
    fmt: BlockFormat  # to whose blocks groups are padded along "k"
    decoded: bool

    @property
    def per_group(self) -> bool:
        """Whether groups have tensor scales of their own."""
        return self.decoded and self.a_scale.dim() > 0


def grouped_matmul(
    a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype, build: Build | None = None
) -> torch.Tensor:
    """Product of what the table admits. Arguments as in the op; build: the default is `choose_build`'s."""
    factors = _factors(a, b)
    rows, experts = factors.a.shape[0], groups.ends.shape[0]
    if along == "m":
        out = factors.a.new_empty((rows, factors.b.shape[0] // experts), dtype=out_dtype)
        _launch_along_m(out, factors, groups, build)
    else:
        out = factors.a.new_empty((experts, rows, factors.b.shape[0]), dtype=out_dtype)
        _launch_along_k(out, factors, groups, False, build)
    return out


def add_grouped_matmul(out: torch.Tensor, a: Operand, b: Operand, groups: Groups, build: Build | None = None) -> None:
    """out [E, N, K] f32 += the groups' products, in the one pass that they take; empty groups are not touched."""
    _launch_along_k(out, _factors(a, b), groups, True, build)


def _factors(a: Operand, b: Operand) -> Factors:
    if a.format.element is E2M1:
        assert a.global_scale is not None and b.global_scale is not None
        da, db = aligned_rows(decode(a)), aligned_rows(decode(b))
        a_scale, b_scale = a.global_scale, b.global_scale
        if a_scale.dim() or b_scale.dim():
            # One scale a group, so that a tile loads one.
            a_scale = b_scale = a_scale * b_scale
        return Factors(da, a_scale, db, b_scale, a.format, True)
    qa, qb = aligned_rows(a.qdata), aligned_rows(b.qdata.reshape(-1, b.qdata.shape[-1]))
    return Factors(qa, a.scale, qb, b.scale, a.format, False)


def _launch_along_m(out: torch.Tensor, factors: Factors, groups: Groups, build: Build | None) -> None:
    (M, N), K, experts, fmt = out.shape, factors.a.shape[1], groups.ends.shape[0], factors.fmt
    available = multiprocessors(out.device)
    build = choose_build("m", M, experts, M, N, K, available) if build is None else build
    build = replace(
        build,
        block=fmt.block[1],
        along="m",
        decoded=factors.decoded,
        per_group=factors.per_group,
        b_square=not factors.decoded,
        copy_out=copies_out(N, out.dtype),
    )
    schedule = row_schedule(groups, M, fmt, build.tile_m)
    # As many as there may be: how many there are, the schedule says.
    tiles = count_rows(M, experts, build.tile_m) * ceil_div(N, build.width)
    _launch(factors, schedule, out, (M, N, K), tiles, build)


def _launch_along_k(out: torch.Tensor, factors: Factors, groups: Groups, accumulate: bool, build: Build | None) -> None:
    """out [E, M, N] = or += the groups' products."""
    (experts, M, N), padded, fmt = out.shape, factors.a.shape[1], factors.fmt
    available, block = multiprocessors(out.device), fmt.block[1]
    mean = ceil_div(padded, experts * block) * block
    build = choose_build("k", padded, experts, M, N, mean, available) if build is None else build
    # The copy engine ends where the tensor does; a tile that runs on into the next group's rows is stored.
    copy_out = not accumulate and copies_out(N, out.dtype) and M % build.tile_m == 0
    how = {"decoded": factors.decoded, "per_group": factors.per_group, "accumulate": accumulate, "copy_out": copy_out}
    build = replace(build, block=block, along="k", **how)
    schedule = group_schedule(groups, padded, fmt)
    tiles = experts * ceil_div(M, build.tile_m) * ceil_div(N, build.width)
    _launch(factors, schedule, out.view(experts * M, N), (M, N, padded), tiles, build)


def _launch(factors: Factors, schedule, out, sizes: tuple[int, int, int], programs: int, build: Build) -> None:
    """out: a matrix."""
    tiles = tiles_of(build)
    a, a_scale, b, b_scale, *_ = factors
    launch(
        grouped_matmul_bf16_kernel if build.decoded else grouped_matmul_fp8_kernel,
        min(programs, multiprocessors(out.device) // build.ctas),
        *in_tiles(a, a_scale, b, b_scale, tiles),
        schedule,
        out if tiles.out is None else (out, tiles.out),
        out,
        *sizes,
        B=build,
        num_warps=WARPGROUP,
        num_ctas=build.ctas,
    )
