"""NT GEMMs on Hopper, plain and grouped, with the kernel of `gluon_pipeline.py`: one launch, output rounded once.

    plain       a [M, K]   b [N, K]     out [M, N]      scales for each block of K
    along "m"   a [M, K]   b [E·N, K]   out [M, N]      the first tile of rows of a group starts with the group
    along "k"   a [N, P]   b [K, P]     out [E·N, K]    tiles of out[g], contracted over the tokens of group g

A tile may extend into the rows of the next group, along "m" at the end of each group, along "k" if N is not a multiple
of the tile. TMA writes whole waves, and masked stores write partial ones. The kernel decides this at the end of each
wave, because only the device knows where groups end. Neither writes columns from N on.

Hopper has no FP4 tensor cores, so NVFP4 operands of groups are decoded to bf16 first, then multiplied in bf16:

    a, b  4 bits ──decode──▶ bf16, exact ──Gluon, by groups──▶ Σ in fp32 · both tensor scales ──▶ out, rounded once

An element times its block scale has six significant bits, so it is exact in bf16. The bf16 operands, 2 bytes an
element, exist only during this GEMM; for weights of experts, they take as much memory as a high-precision copy.
PyTorch's grouped GEMM in bf16 cannot be used, because it rounds its output before the tensor scales could be applied.
"""

import functools

import torch
from triton.experimental.gluon import language as gl

from torchao_blockwise.formats import E2M1, Groups, Operand
from torchao_blockwise.ops.gemm.builds import STAGE_BYTES, WAVE_ROWS, Build, choose_build, complete
from torchao_blockwise.ops.gemm.gluon_pipeline import matmul_kernel
from torchao_blockwise.ops.gemm.gluon_ring import WARPGROUP
from torchao_blockwise.ops.gemm.kernels_decode import decode
from torchao_blockwise.ops.groups.tables.kernels_triton import group_schedule, row_schedule
from torchao_blockwise.ops.groups.tables.layout import count_rows
from torchao_blockwise.ops.launch import Tile, ceil_div, launch
from torchao_blockwise.ops.operands import new_output
from torchao_blockwise.ops.padding import ROW_BYTES, aligned_rows


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def matmul(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None, build: Build | None = None
) -> torch.Tensor:
    """Return a · bᵀ. Arguments as in the op; build: by default that of `choose_build`."""
    out = new_output(a, b, out_dtype)
    _launch(out, a, b, bias=bias, build=build)
    return out


def grouped_matmul(
    a: Operand, b: Operand, groups: Groups, along: str, out_dtype: torch.dtype, build: Build | None = None
) -> torch.Tensor:
    """`matmul` for groups."""
    out = new_output(a, b, out_dtype, groups, along)
    _launch(out, a, b, groups, along, build=build)
    return out


def add_matmul(
    out: torch.Tensor, a: Operand, b: Operand, groups: Groups | None = None, build: Build | None = None
) -> None:
    """out f32 += a · bᵀ, with groups along "k", in one pass; empty groups are neither read nor written."""
    _launch(out, a, b, groups, "" if groups is None else "k", accumulate=True, build=build)


def _launch(
    out: torch.Tensor,
    a: Operand,
    b: Operand,
    groups: Groups | None = None,
    along: str = "",
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    build: Build | None = None,
) -> None:
    (M, N), fmt = out.shape[-2:], a.format
    decoded = fmt.element is E2M1
    a_scale, b_scale = a.scale, b.scale
    if decoded:
        assert a.global_scale is not None and b.global_scale is not None
        qa, qb, a_scale, b_scale = decode(a), decode(b), a.global_scale, b.global_scale
        if a_scale.dim() or b_scale.dim():
            # One scale for each group, so that a tile loads one.
            a_scale = b_scale = a_scale * b_scale
    else:
        qa, qb = a.qdata, b.qdata.flatten(0, -2) if along == "m" else b.qdata
    K, block, available = qa.shape[1], fmt.block[1], multiprocessors(out.device)
    experts = 1 if groups is None else groups.ends.shape[0]
    mean = ceil_div(K, experts * block) * block if along == "k" else K
    build = choose_build(M, N, mean, block, available, along, experts) if build is None else build
    is_split = build.splits > 1
    # TMA masks only the end of the tensor, so along "k" tiles that extend into the next group's rows are stored
    # directly. It needs rows that are multiples of 16 bytes. Direct stores of fp32 fill whole sectors anyway.
    copy_out = out.itemsize == 2 and N * out.itemsize % ROW_BYTES == 0 and (along != "k" or M % build.tile_m == 0)
    build = complete(
        build,
        block=block,
        along=along,
        decoded=decoded,
        per_group=decoded and a_scale.dim() > 0,
        b_square=not decoded and b.format.is_square,
        copy_out=copy_out and not (accumulate or is_split),
        accumulate=accumulate and not is_split,
        has_bias=bias is not None and not is_split,
    )
    target = out.new_empty((build.splits, M, N), dtype=torch.float32) if is_split else out
    rows = experts * ceil_div(M, build.tile_m)
    if groups is None:
        behind = (bias.contiguous() if bias is not None and build.has_bias else out), None
    elif along == "m":
        # The largest possible number; the schedule contains the actual one.
        rows = count_rows(M, experts, build.tile_m)
        behind = None, row_schedule(groups, M, fmt, build.tile_m)
    else:
        target = target.view(-1, N)
        behind = None, group_schedule(groups, K, fmt)
    *tiles, out_tile = _tiles_of(build)
    matrices = zip((qa, a_scale, qb, b_scale), tiles)
    launch(
        matmul_kernel, min(rows * ceil_div(N, build.tile_n) * build.splits, available),
        *[x.contiguous() if tile is None else (aligned_rows(x), tile) for x, tile in matrices], *behind,
        target if out_tile is None else (target, out_tile), None if groups is None else target, M, N, K,
        B=build, num_warps=WARPGROUP,
    )  # fmt: skip
    if is_split:
        product = torch.sum(target, 0, out=out if out.dtype == torch.float32 and not accumulate else None)
        product = product if bias is None else product.add_(bias)
        if accumulate:
            out.add_(product)
        elif product is not out:
            out.copy_(product)


@functools.cache
def _tiles_of(build: Build) -> tuple[Tile | None, ...]:
    """Return the TMA tiles of a, a's scales, b, b's scales and `out`; None for tensors that TMA does not copy."""

    def tile(rows: int, columns: int, itemsize: int) -> Tile:
        # Scales, whose tiles have one row, are not swizzled.
        swizzle = STAGE_BYTES if rows > 1 else 0
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=itemsize * 8, rank=2)
        return Tile((rows, columns), layout)

    return (
        tile(build.copied_rows, build.depth, build.itemsize),
        None if build.decoded else tile(1, build.copied_rows, 4),
        tile(build.tile_n, build.depth, build.itemsize),
        None if build.decoded or build.b_square else tile(1, build.tile_n, 4),
        tile(WAVE_ROWS, build.tile_n, 2) if build.copy_out else None,
    )
