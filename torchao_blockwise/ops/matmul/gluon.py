"""NT products of FP8 operands on Hopper, in Gluon: a[M, K] @ b[N, K].T with scales a block of K, output rounded once.

Persistent programs, one a multiprocessor. A producer warp fills a ring of shared memory with the copy engine (TMA),
consumer warpgroups multiply and promote:

    producer    a [TILE_M, 128]  b [TILE_N, 128]  scales ──▶ ring of STAGES, a barrier "full" and one "empty" a stage
    consumer 0  rows   0 .. 127: wgmma wave 0 → partial → acc 0 += partial · scales, wave 1 → partial → acc 1 += ..
    consumer 1  rows 128 .. 255: the same, out of step: while one promotes on the CUDA cores, the other's wgmma runs

An e4m3 product is accumulated in some 14 bits inside wgmma, so a partial sum ends with its block of K and is promoted
to fp32. A wave is 64 rows, the height of a wgmma. Two waves a consumer share the registers of one partial, which leaves
room for 256×128 accumulators: the way from the L2 cache bounds these products, and its bytes fall with the tile.

A pair of multiprocessors (a cluster) may work as one program on twice the columns: each reads its own rows of b, and
one reads the rows of a for both (multicast), a third less from the L2 cache. It frees a stage when both have read it.

Ragged M, N and K: the copy engine reads zeros beside a tensor and writes nothing there.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, BlockFormat
from torchao_blockwise.ops.backend import interpreting
from torchao_blockwise.ops.matmul.rows import ROW_BYTES, aligned_rows

# Names of the copies moved in Triton 3.8.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Rows of a wgmma, and bytes of the widest swizzle, which is also a block of K.
_WAVE_ROWS = 64
_WARPGROUP = 4
_SWIZZLE = 128
_WAVE: gl.constexpr = gl.constexpr(_WAVE_ROWS)
_WARPS: gl.constexpr = gl.constexpr(_WARPGROUP)
_MMA_K = 32
# Of a thread: two consumers and a producer share the 64 Ki of a multiprocessor.
_CONSUMER_REGISTERS: gl.constexpr = gl.constexpr(240)
_PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)


@dataclass(frozen=True)
class _Build:
    """What a build of the kernel is specialised on."""

    tile_n: int  # columns of a multiprocessor
    consumers: int  # warpgroups that multiply
    waves: int  # of 64 rows, that a consumer takes in turn: 1 or 2
    stages: int
    group: int  # rows of tiles whose programs run side by side and share tiles of b in the L2 cache
    ctas: int = 1  # multiprocessors of a program: 1, or 2 from Triton 3.8 on
    block: int = 0
    splits: int = 1  # of K; their products are added afterwards
    b_square: bool = False
    copy_out: bool = False  # whole tiles leave through shared memory and the copy engine
    accumulate: bool = False
    has_bias: bool = False

    @property
    def all_waves(self) -> int:
        return self.consumers * self.waves

    @property
    def tile_m(self) -> int:
        return self.all_waves * _WAVE_ROWS

    @property
    def width(self) -> int:
        """Columns of a program."""
        return self.tile_n * self.ctas


_BUILDS = (
    _Build(tile_n=128, consumers=2, waves=2, stages=3, group=4, ctas=2),
    _Build(tile_n=128, consumers=2, waves=2, stages=3, group=4),
    _Build(tile_n=128, consumers=2, waves=1, stages=5, group=8),
    # Few rows: bound by reading b from memory, so many stages in flight and many programs.
    _Build(tile_n=64, consumers=1, waves=1, stages=8, group=1),
)
# In Triton 3.7 consumers cannot arrive at the other multiprocessor's barriers.
_MAX_CTAS = 2 if hasattr(tma, "async_load") else 1
# What a second launch takes, in bytes that a multiprocessor would read in that time: 4 µs.
_SPLIT_BYTES = 200_000


@gluon.constexpr_function
def _accumulator_layout(tile_n, ctas):
    splits = {"cga_layout": [[0, 1]]} if ctas == 2 else {}
    return gl.NVMMADistributedLayout([3, 0], [_WARPGROUP, 1], [16, tile_n, _MMA_K], **splits)


@gluon.constexpr_function
def _barrier_layout(ctas, shared):
    """Of a barrier a multiprocessor, or of one that a pair shares, which lies in the first's memory."""
    return mbarrier.MBarrierLayout([[0 if shared else 1]] if ctas == 2 else None)


@gluon.jit
def _rank(ctas: gl.constexpr):
    """Which of a program's multiprocessors this is. The compiler takes it for one number."""
    if ctas == 1:
        return 0
    else:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The following stage of the ring, and the parity of its barriers' phase."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _locate_tile(tile, M, N, K, B: gl.constexpr):
    """(split, row, column, first block of K, end of blocks) of a tile; B.group rows of tiles, column by column."""
    tiles_m, tiles_n, blocks = gl.cdiv(M, B.tile_m), gl.cdiv(N, B.width), gl.cdiv(K, B.block)
    split = tile // (tiles_m * tiles_n)
    tile -= split * tiles_m * tiles_n
    first_m = tile // (B.group * tiles_n) * B.group
    rows = gl.minimum(tiles_m - first_m, B.group)
    in_group = tile % (B.group * tiles_n)
    share = gl.cdiv(blocks, B.splits)
    first, last = split * share, gl.minimum((split + 1) * share, blocks)
    return split, (first_m + in_group % rows) * B.tile_m, in_group // rows * B.width, first, last


@gluon.jit
def _load_shared(descriptor, coordinates, bar, target, B: gl.constexpr):
    """A copy that the multiprocessors of a program share."""
    if B.ctas == 2:
        _load_async(descriptor, coordinates, bar, target, multicast=True)
    else:
        _load_async(descriptor, coordinates, bar, target)


@gluon.jit
def _free(empty, pair_empty, stage, B: gl.constexpr):
    mbarrier.arrive(empty.index(stage), count=1)
    if B.ctas == 2:
        mbarrier.arrive(pair_empty.index(stage), count=1)


@gluon.jit
def _produce(operands, rings, M, N, K, B: gl.constexpr):
    """Fill the ring, a stage a block of K, for every tile of this program."""
    a, a_scale, b, b_scale = operands
    a_ring, a_scale_ring, b_ring, b_scale_ring, full, empty, pair_empty = rings
    WAVES: gl.constexpr = B.all_waves
    BYTES: gl.constexpr = (B.tile_m + B.tile_n) * B.block + (B.tile_m + (0 if B.b_square else B.tile_n)) * 4
    tiles = gl.cdiv(M, B.tile_m) * gl.cdiv(N, B.width) * B.splits
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, row, column, first, last = _locate_tile(tile, M, N, K, B)
        for k in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            if B.ctas == 2:
                # The first of the pair copies into the other's memory too.
                mbarrier.wait(pair_empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            for wave in gl.static_range(WAVES):
                rows = row + wave * _WAVE
                _load_shared(a, [rows, k * B.block], bar, a_ring.index(stage * WAVES + wave), B)
                _load_shared(a_scale, [k, rows], bar, a_scale_ring.index(stage * WAVES + wave), B)
            _load_async(b, [column, k * B.block], bar, b_ring.index(stage))
            if not B.b_square:
                _load_async(b_scale, [k, column], bar, b_scale_ring.index(stage))
            stage, phase = _next(stage, phase, B.stages)
    if B.ctas == 2:
        # The other's consumers arrive here: stay until the last has.
        for _ in range(B.stages):
            mbarrier.wait(pair_empty.index(stage), phase)
            stage, phase = _next(stage, phase, B.stages)


@gluon.jit
def _promote(acc, partial, a_scale, b_scale, B: gl.constexpr):
    """acc + partial · a_scale · b_scale."""
    if B.b_square:
        # One FMA an element; scales whose product overflows belong to products that do.
        acc += partial * (a_scale * b_scale)[:, None]
    else:
        acc += (partial * a_scale[:, None]) * b_scale[None, :]
    return acc


@gluon.jit
def _write(acc, MMA: gl.constexpr, staging, out, bias_ptr, split, row, column, M, N, B: gl.constexpr):
    """out[row : row + 64, column : column + width] (+)= acc + bias, rounded once."""
    WIDTH: gl.constexpr = B.width
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))
    if B.has_bias:
        acc += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    if B.copy_out:
        # The copy before has left shared memory.
        tma.store_wait(0)
        staging.store(acc.to(out.dtype))
        fence_async_shared()
        _store_async(out, [row, column], staging)
    else:
        rows = row + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, MMA))
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        ptrs = out + (split * M + rows).to(gl.int64)[:, None] * N + columns[None, :]
        if B.accumulate:
            acc += gl.load(ptrs, mask=mask, other=0.0)
        gl.store(ptrs, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(CONSUMER: gl.constexpr, b_scale_ptr, out, out_ring, bias_ptr, rings, M, N, K, B: gl.constexpr):
    """Multiply, promote and write the CONSUMER-th waves · 64 rows of every tile of this program."""
    a_ring, a_scale_ring, b_ring, b_scale_ring, full, empty, pair_empty = rings
    WIDTH: gl.constexpr = B.width
    FIRST: gl.constexpr = CONSUMER * B.waves
    MMA: gl.constexpr = _accumulator_layout(B.tile_n, B.ctas)
    tiles = gl.cdiv(M, B.tile_m) * gl.cdiv(N, B.width) * B.splits
    # False, which the compiler cannot know: the second wave begins from the first's registers and takes no others.
    from_partial = M < 0
    zeros = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        split, row, column, first, last = _locate_tile(tile, M, N, K, B)
        acc0 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
        acc1 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
        if B.b_square:
            block_n = (column + _rank(B.ctas) * B.tile_n) // B.block
            b_scale_ptrs = b_scale_ptr + gl.minimum(block_n, gl.cdiv(N, B.block) - 1).to(gl.int64) * gl.cdiv(K, B.block)
            # One block ahead: the way from memory takes about as long as a block.
            b_scale_next = gl.load(b_scale_ptrs + first, mask=first < last, other=0.0)
        for k in range(first, last):
            if B.b_square:
                b_scale = b_scale_next
                b_scale_next = gl.load(b_scale_ptrs + gl.minimum(k + 1, last - 1))
            mbarrier.wait(full.index(stage), phase)
            b = b_ring.index(stage).permute((1, 0))
            wave = stage * B.all_waves + FIRST
            partial = warpgroup_mma(a_ring.index(wave), b, zeros, use_acc=False, is_async=True)
            a_scale = a_scale_ring.index(wave).reshape([_WAVE]).load(gl.SliceLayout(1, MMA))
            if not B.b_square:
                b_scale = b_scale_ring.index(stage).reshape([WIDTH]).load(gl.SliceLayout(0, MMA))
            partial = warpgroup_mma_wait(0, deps=[partial])
            if B.waves == 1:
                _free(empty, pair_empty, stage, B)
            acc0 = _promote(acc0, partial, a_scale, b_scale, B)
            if B.waves == 2:
                second = warpgroup_mma(a_ring.index(wave + 1), b, partial, use_acc=from_partial, is_async=True)
                a_scale = a_scale_ring.index(wave + 1).reshape([_WAVE]).load(gl.SliceLayout(1, MMA))
                # acc0 passes through, so that its promotion cannot sink below this wait.
                second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])
                _free(empty, pair_empty, stage, B)
                acc1 = _promote(acc1, second, a_scale, b_scale, B)
            stage, phase = _next(stage, phase, B.stages)
        row += FIRST * _WAVE
        staging = out_ring.index(CONSUMER) if B.copy_out else out_ring
        _write(acc0, MMA, staging, out, bias_ptr, split, row, column, M, N, B)
        if B.waves == 2:
            _write(acc1, MMA, staging, out, bias_ptr, split, row + _WAVE, column, M, N, B)
    if B.copy_out:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "K"])
def _matmul_fp8_kernel(
    a,  # descriptor of [M, K] e4m3
    a_scale,  # descriptor of [K/block, M] f32
    b,  # descriptor of [N, K] e4m3
    b_scale,  # descriptor of [K/block, N] f32, or pointer to [N/block, K/block] f32 where B.b_square
    bias_ptr,  # [N], read where B.has_bias
    out,  # descriptor of [M, N] where B.copy_out, else pointer to [splits, M, N]
    M,
    N,
    K,
    B: gl.constexpr,  # a _Build
):
    # A tile of b has one scale where its blocks are square.
    gl.static_assert(B.block % B.tile_n == 0 or not B.b_square)
    a_ring = gl.allocate_shared_memory(a.dtype, [B.stages * B.all_waves, _WAVE, B.block], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [B.stages, B.width, B.block], b.layout)
    a_scale_ring = gl.allocate_shared_memory(gl.float32, [B.stages * B.all_waves, 1, _WAVE], a_scale.layout)
    # What a build has no use for stands in its place: partitions take no None.
    b_scale_ring = a_scale_ring
    if not B.b_square:
        b_scale_ring = gl.allocate_shared_memory(gl.float32, [B.stages, 1, B.width], b_scale.layout)
    out_ring = a_scale_ring
    if B.copy_out:
        out_ring = gl.allocate_shared_memory(out.dtype, [B.consumers, _WAVE, B.width], out.layout)
    OWN: gl.constexpr = _barrier_layout(B.ctas, False)
    full = gl.allocate_shared_memory(gl.int64, [B.stages, B.ctas], OWN)
    empty = gl.allocate_shared_memory(gl.int64, [B.stages, B.ctas], OWN)
    pair_empty = gl.allocate_shared_memory(gl.int64, [B.stages, 1], _barrier_layout(B.ctas, True))
    STAGES: gl.constexpr = B.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=B.consumers)
        # Triton counts for both of a pair.
        mbarrier.init(pair_empty.index(i), count=B.consumers)
    fence_async_shared()
    rings = (a_ring, a_scale_ring, b_ring, b_scale_ring, full, empty, pair_empty)
    operands = (a, a_scale, b, b_scale)
    if B.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (0, b_scale, out, out_ring, bias_ptr, rings, M, N, K, B)),
                (_produce, (operands, rings, M, N, K, B)),
            ],
            [1],
            [_PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(B.consumers == 2)
        gl.warp_specialize(
            [
                (_consume, (0, b_scale, out, out_ring, bias_ptr, rings, M, N, K, B)),
                (_consume, (1, b_scale, out, out_ring, bias_ptr, rings, M, N, K, B)),
                (_produce, (operands, rings, M, N, K, B)),
            ],
            [_WARPS, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )


def why_not(a, b, a_fmt: BlockFormat, b_fmt: BlockFormat) -> str | None:
    """Why these kernels cannot compute this product on a Hopper GPU, or None if they can."""
    if interpreting():
        return "Triton's interpreter does not know Gluon"
    if a_fmt is not FP8_1X128 or b_fmt not in (FP8_1X128, FP8_128X128):
        return f"the kernels multiply fp8_1x128 by fp8_128x128 or fp8_1x128, got {a_fmt.name} · {b_fmt.name}"
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if 0 in (m, n, k):
        return f"the copy engine has no empty tensors, got M={m}, N={n}, K={k}"
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=4096)
def choose_build(m: int, n: int, k: int, block: int, multiprocessors: int) -> _Build:
    """The build whose programs should read the fewest bytes, one after the other, from the L2 cache.

    A tile reads (tile_m + tile_n) · K bytes; programs take tiles in rounds. Splitting K fills rounds that few tiles
    leave empty, and costs a launch and a write and a read of each split's fp32 product.
    """
    blocks = triton.cdiv(k, block)

    def bytes_read(build: _Build) -> float:
        tiles = triton.cdiv(m, build.tile_m) * triton.cdiv(n, build.width) * build.splits
        rounds = triton.cdiv(tiles, multiprocessors // build.ctas)
        read = rounds * (build.tile_m / build.ctas + build.tile_n) * block * triton.cdiv(blocks, build.splits)
        return read + (build.splits > 1) * (_SPLIT_BYTES + build.splits * m * n * 8 / multiprocessors)

    builds = [b for b in _BUILDS if b.ctas <= min(_MAX_CTAS, multiprocessors)]
    candidates = [replace(b, splits=s) for b in builds for s in (1, 2, 4, 8) if s == 1 or 2 * s <= blocks]
    return min(candidates, key=bytes_read)


def matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    build: _Build | None = None,
) -> torch.Tensor:
    """[M, N] product, within what `why_not` admits. Arguments as in the op; build: the default is `choose_build`'s."""
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    return _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, bias, False, build)


def add_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global: torch.Tensor | None,
    a_fmt: BlockFormat,
    b_fmt: BlockFormat,
    build: _Build | None = None,
) -> torch.Tensor:
    """out [M, N] f32 += a @ b.T, in the one pass that the product takes."""
    return _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, None, True, build)


def _launch(a, a_scale, b, b_scale, a_fmt, b_fmt, out, bias, accumulate, build):
    M, N = out.shape
    block = a_fmt.block[1]
    a, b = aligned_rows(a), aligned_rows(b)
    K = a.shape[1]
    build = choose_build(M, N, K, block, _multiprocessors(a.device)) if build is None else build
    split = build.splits > 1
    target = out.new_empty((build.splits, M, N), dtype=torch.float32) if split else out
    b_square = b_fmt.is_square
    build = replace(
        build,
        block=block,
        b_square=b_square,
        has_bias=bias is not None and not split,
        accumulate=accumulate and not split,
        # The copy engine asks for rows of whole 16 bytes. Direct stores of fp32 fill whole sectors as it is.
        copy_out=not (split or accumulate) and out.itemsize == 2 and N * out.itemsize % ROW_BYTES == 0,
    )
    # How tiles are dealt out to a pair: a's are shared, b's rows and the output's columns are halved.
    shared, rows_halved, columns_halved = ([[0, 0]], [[1, 0]], [[0, 1]]) if build.ctas == 2 else (None, None, None)
    if b_square:
        b_scale = b_scale.contiguous()
    else:
        b_scale = _describe(aligned_rows(b_scale), 1, build.width, columns_halved)
    arguments = (
        _describe(a, _WAVE_ROWS, block, shared),
        _describe(aligned_rows(a_scale), 1, _WAVE_ROWS, shared),
        _describe(b, build.width, block, rows_halved),
        b_scale,
        bias.contiguous() if build.has_bias else out,
        _describe(target, _WAVE_ROWS, build.width, columns_halved) if build.copy_out else target,
        M,
        N,
        K,
    )
    tiles = triton.cdiv(M, build.tile_m) * triton.cdiv(N, build.width) * build.splits
    grid = (min(tiles, _multiprocessors(a.device) // build.ctas),)
    with torch.cuda.device_of(a):
        _matmul_fp8_kernel[grid](*arguments, B=build, num_warps=_WARPGROUP, num_ctas=build.ctas)
    if split:
        product = target.sum(0)
        product = product if bias is None else product.add_(bias)
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)
    return out


def _describe(x: torch.Tensor, rows: int, columns: int, halved: list | None) -> TensorDescriptor:
    """What the copy engine needs to know to copy tiles of [rows, columns] of the matrix `x`."""
    # Rows of a tile that fill a swizzle are swizzled; rows of scales are read as they lie.
    swizzle = _SWIZZLE if rows > 1 else 0
    dealt = {} if halved is None else {"cga_layout": halved}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=x.itemsize * 8, rank=2, **dealt)
    # The stride of a lone row may be anything.
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, columns], layout)
