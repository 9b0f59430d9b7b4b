"""The Gluon kernel of `matmul` and `grouped_matmul` on Hopper; kernels_gluon.py launches it.

Programs are persistent, one for each multiprocessor. A producer warp fills a ring in shared memory with TMA copies, and
consumer warpgroups multiply and promote:

    producer    a [TILE_M, 128]  b [TILE_N, 128]  scales ──▶ ring of STAGES, a barrier "full" and one "free" a stage
    consumer 0  rows   0 .. 127: wgmma wave 0 → partial → acc 0 += partial · scales, wave 1 → partial → acc 1 += ..
    consumer 1  rows 128 .. 255: the same, out of step: while one promotes on the CUDA cores, the other's wgmma runs

wgmma accumulates e4m3 products with about 14 bits, so each partial sum covers one block of K and is then promoted to
fp32. A wave is 64 rows, the height of a wgmma. The two waves of a consumer share the registers of one partial sum,
which leaves room for accumulators of 256×128: with larger tiles, a GEMM reads fewer bytes from the L2 cache.

Ragged M, N and K: TMA reads zeros outside a tensor, and writes nothing there.

Operands that were decoded to bf16 (B.decoded) use the same pipeline without scales: see `gluon_decoded.py`.

Groups of tokens (B.along): a schedule in device memory contains the positions of tiles (`gluon_order.py`). Rows of a
tile after its group belong to another one; they are read, but not written. Waves without rows of the group are not
multiplied. Consumers alternate waves, so that both have work in a half-used tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchao_blockwise.ops.gemm.builds import WAVE_ROWS
from torchao_blockwise.ops.gemm.gluon_decoded import accumulate_decoded
from torchao_blockwise.ops.gemm.gluon_order import load_entry, locate_tile, turns_of_program
from torchao_blockwise.ops.gemm.gluon_ring import (
    WARPGROUP,
    accumulator_layout,
    first_wave,
    free_stage,
    free_stage_after,
    make_barriers,
    next_stage,
    wait_for_stage,
    wave_of,
)

# Names of the copies moved in Triton 3.8.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_WAVE: gl.constexpr = gl.constexpr(WAVE_ROWS)
_WARPS: gl.constexpr = gl.constexpr(WARPGROUP)
# Registers of a thread: two consumers and a producer share the 64 Ki of a multiprocessor.
_CONSUMER_REGISTERS: gl.constexpr = gl.constexpr(240)
_PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)


@gluon.jit
def _produce(operands, rings, groups, M, N, K, B: gl.constexpr):
    """Fill the ring, stage by stage of K, for every tile of this program."""
    a, a_scale, b, b_scale = operands
    a_ring, a_scale_ring, b_ring, b_scale_ring, full = rings
    COPIES: gl.constexpr = B.copies
    turn, turns, step, entries = turns_of_program(groups, M, N, B)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    tile = gl.to_tensor(turn)
    entry = load_entry(tile, entries, groups, M, N, B)
    # In a `for` loop, Triton 3.6 and 3.7 lose the loads of the next entry, so that every tile is the first one.
    while tile < turns:
        part, row, _, _, column, first, last = locate_tile(tile, entry, M, N, K, B)
        tile += step
        # Loaded while this tile is copied.
        entry = load_entry(tile, entries, groups, M, N, B)
        # Each group of rows has N rows of b; the last tile extends into those of the next group.
        b_row = part * N + column if B.along == "m" else column
        for k in range(first, last, B.stage_blocks):
            wait_for_stage(stage, phase)
            bar = full.index(stage)
            mbarrier.expect(bar, B.copied_bytes)
            for copy in gl.static_range(COPIES):
                rows = row + copy * B.copied_rows
                _load_async(a, [rows, k * B.block], bar, a_ring.index(stage * COPIES + copy))
                if not B.decoded:
                    _load_async(a_scale, [k, rows], bar, a_scale_ring.index(stage * COPIES + copy))
            _load_async(b, [b_row, k * B.block], bar, b_ring.index(stage))
            if not (B.b_square or B.decoded):
                _load_async(b_scale, [k, b_row], bar, b_scale_ring.index(stage))
            stage, phase = next_stage(stage, phase, B.stages)


@gluon.jit
def _scaled(partial, a_scale, b_scale, B: gl.constexpr):
    """Return two factors whose product is partial · a_scale · b_scale, to be added with one FMA for each element.

    The first stays in the registers of `partial`, which the next wave reuses. With the product in these registers, each
    multiplication would wait for the addition before it, because no other registers are free.
    """
    if B.b_square:
        # Scales whose product overflows belong to products that do.
        return partial, (a_scale * b_scale)[:, None]
    else:
        return partial * a_scale[:, None], b_scale[None, :]


@gluon.jit
def _copy_out(acc, staging, out, row, column, B: gl.constexpr):
    """Write a whole wave through shared memory and TMA."""
    if B.along != "m":
        # Wait for the copy of the previous tile from this buffer; that of the previous wave may still run.
        tma.store_wait(B.waves - 1)
    staging.store(acc.to(out.dtype))
    fence_async_shared()
    _store_async(out, [row, column], staging)


@gluon.jit
def _store_out(acc, MMA: gl.constexpr, out, base, row, start, end, column, N, B: gl.constexpr):
    """Store rows `start` to `end`, columns before N, from registers. base: the rows of `out` before this part."""
    columns = column + gl.arange(0, B.tile_n, layout=gl.SliceLayout(0, MMA))
    rows = row + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, MMA))
    own = rows < end
    if B.along == "m":
        own &= rows >= start
    mask = own[:, None] & (columns < N)[None, :]
    ptrs = out + (base + rows).to(gl.int64)[:, None] * N + columns[None, :]
    if B.accumulate:
        acc += gl.load(ptrs, mask=mask, other=0.0)
    gl.store(ptrs, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _write(
    acc, MMA: gl.constexpr, staging, out, bias_ptr, groups, part, row, start, end, column, M, N, B: gl.constexpr
):
    """out[row : row + 64, column : column + width] (+)= acc + bias, rounded once, of rows from `start` to `end`."""
    if B.has_bias:
        columns = column + gl.arange(0, B.tile_n, layout=gl.SliceLayout(0, MMA))
        acc += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    if B.along == "m":
        base = 0
    else:
        base = part * M
    if not B.copy_out:
        _store_out(acc, MMA, out, base, row, start, end, column, N, B)
    elif B.along == "":
        _copy_out(acc, staging, out, row, column, B)
    elif B.along == "k":
        _copy_out(acc, staging, out, base + row, column, B)
    elif row >= start and row + _WAVE <= end:
        _copy_out(acc, staging, out, row, column, B)
    elif row < end:
        # TMA masks only the end of the tensor, but the next rows belong to another group.
        _store_out(acc, MMA, groups[1], base, row, start, end, column, N, B)


@gluon.jit
def _load_row_scales(ring, stage, WAVE: gl.constexpr, B: gl.constexpr):
    """Return the scales of a wave."""
    if B.copies == 1:
        scales = ring.index(stage).reshape([B.copied_rows]).slice(WAVE * _WAVE, _WAVE)
    else:
        scales = ring.index(stage * B.copies + WAVE).reshape([_WAVE])
    return scales.load(gl.SliceLayout(1, accumulator_layout(B)))


@gluon.jit
def _load_column_scales(ring, stage, B: gl.constexpr):
    return ring.index(stage).reshape([B.tile_n]).load(gl.SliceLayout(0, accumulator_layout(B)))


@gluon.jit
def _multiply_part(a, b, acc, use_acc, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Issue the wgmma of columns FIRST .. FIRST + COUNT of a wave and of a block of b."""
    return warpgroup_mma(a.slice(FIRST, COUNT, 1), b.slice(FIRST, COUNT, 0), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _multiply_first(
    LIVE: gl.constexpr, WAVE: gl.constexpr, a_ring, a_scale_ring, b, b_scale_ring, stage, b_scale, B: gl.constexpr
):
    """Multiply a consumer's first wave of a stage: (partial sum, a's scales, b's scales).

    Loads from shared memory wait while wgmma reads it. The loads of column scales, 16 for each thread, are issued after
    a part of the wgmmas and before the rest, so that one consumer loads while the other multiplies. Loads complete in
    order: if b's scales are there, so are a's, which were loaded first.
    """
    MMA: gl.constexpr = accumulator_layout(B)
    WIDTH: gl.constexpr = B.tile_n
    HALF: gl.constexpr = B.block // 2
    QUARTER: gl.constexpr = B.block // 4
    a = wave_of(a_ring, stage, WAVE, B)
    acc = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    if B.b_square:
        acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
        if LIVE == 2:
            # Does not wait, but keeps loads after it.
            acc = warpgroup_mma_wait(1, deps=[acc])
        a_scale = _load_row_scales(a_scale_ring, stage, WAVE, B)
    elif LIVE == 2:
        acc = _multiply_part(a, b, acc, False, 0, QUARTER)
        a_scale = _load_row_scales(a_scale_ring, stage, WAVE, B)
        b_scale = _load_column_scales(b_scale_ring, stage, B)
        acc = _multiply_part(a, b, acc, True, QUARTER, QUARTER)
        acc = _multiply_part(a, b, acc, True, HALF, HALF)
    else:
        a_scale = _load_row_scales(a_scale_ring, stage, WAVE, B)
        acc = _multiply_part(a, b, acc, False, 0, HALF)
        b_scale = _load_column_scales(b_scale_ring, stage, B)
        acc = _multiply_part(a, b, acc, True, HALF, HALF)
    return warpgroup_mma_wait(0, deps=[acc]), a_scale, b_scale


@gluon.jit
def _accumulate_blocks(
    LIVE: gl.constexpr, CONSUMER: gl.constexpr, b_scale_ptrs, rings, stage, phase, first, last, M, B: gl.constexpr
):
    """Accumulate blocks first .. last of K, each promoted, for the first LIVE waves of a consumer."""
    a_ring, a_scale_ring, b_ring, b_scale_ring, full = rings
    WAVE: gl.constexpr = first_wave(CONSUMER, B)
    WIDTH: gl.constexpr = B.tile_n
    MMA: gl.constexpr = accumulator_layout(B)
    # False, but unknown to the compiler, so that the second wave reuses the registers of the first.
    from_partial = M < 0
    zero = gl.where(from_partial, 1, 0)
    acc0 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    acc1 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    b_scale = 0.0
    if B.b_square:
        # Load one block ahead, because a load from memory takes about as long as a block.
        b_scale_next = gl.load(b_scale_ptrs + first, mask=first < last, other=0.0)
    mbarrier.wait(full.index(stage), phase, pred=first < last)
    for k in range(first, last):
        if B.b_square:
            b_scale = b_scale_next
            b_scale_next = gl.load(b_scale_ptrs + gl.minimum(k + 1, last - 1))
        following, its_phase = next_stage(stage, phase, B.stages)
        b = b_ring.index(stage).permute((1, 0))
        if LIVE == 0:
            free_stage(stage)
            mbarrier.wait(full.index(following), its_phase, pred=k + 1 < last)
        else:
            partial, a_scale, block_scale = _multiply_first(
                LIVE, WAVE, a_ring, a_scale_ring, b, b_scale_ring, stage, b_scale, B
            )
            if LIVE == 1:
                if B.b_square:
                    free_stage_after(a_scale, 2, stage, zero)
                else:
                    free_stage_after(block_scale, B.tile_n // 4, stage, zero)
                mbarrier.wait(full.index(following), its_phase, pred=k + 1 < last)
            partial, b_factor = _scaled(partial, a_scale, block_scale, B)
            acc0 += partial * b_factor
        if LIVE == 2:
            SECOND: gl.constexpr = WAVE + B.stride
            a = wave_of(a_ring, stage, SECOND, B)
            second = warpgroup_mma(a, b, partial, use_acc=from_partial, is_async=True)
            # With acc0 as a dependency, its promotion cannot move after a wait.
            second, acc0 = warpgroup_mma_wait(1, deps=[second, acc0])
            a_scale = _load_row_scales(a_scale_ring, stage, SECOND, B)
            second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])
            free_stage_after(a_scale, 2, stage, zero)
            # Waiting here and not at the start of the block makes an `output` 4 % faster on an H200.
            mbarrier.wait(full.index(following), its_phase, pred=k + 1 < last)
            second, b_factor = _scaled(second, a_scale, block_scale, B)
            acc1 += second * b_factor
        stage, phase = following, its_phase
    return acc0, acc1, stage, phase


@gluon.jit
def _accumulate(
    LIVE: gl.constexpr, CONSUMER: gl.constexpr, scale, rings, stage, phase, first, last, M, B: gl.constexpr
):
    """Accumulate blocks first .. last of K, for the first LIVE waves of a consumer.

    scale: if B.b_square, pointers to b's scales of a tile; for decoded operands, the product of both tensor scales, of
        the group if B.per_group.
    """
    if B.decoded:
        return accumulate_decoded(LIVE, CONSUMER, scale, rings, stage, phase, first, last, B)
    else:
        return _accumulate_blocks(LIVE, CONSUMER, scale, rings, stage, phase, first, last, M, B)


@gluon.jit
def _consume(CONSUMER: gl.constexpr, scale, out, out_ring, bias_ptr, rings, groups, M, N, K, B: gl.constexpr):
    """Multiply, promote and write the waves of one consumer, of every tile of this program."""
    WAVE: gl.constexpr = first_wave(CONSUMER, B)
    LAST: gl.constexpr = (B.waves - 1) * B.stride * _WAVE
    MMA: gl.constexpr = accumulator_layout(B)
    turn, turns, step, entries = turns_of_program(groups, M, N, B)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    entry = load_entry(turn, entries, groups, M, N, B)
    for tile in range(turn, turns, step):
        part, row, start, end, column, first, last = locate_tile(tile, entry, M, N, K, B)
        tile_scale = scale
        if B.b_square:
            block_n = column // B.block
            block_n = gl.minimum(block_n, gl.cdiv(N, B.block) - 1)
            if B.along == "m":
                block_n += part * gl.cdiv(N, B.block)
            tile_scale = scale + block_n.to(gl.int64) * gl.cdiv(K, B.block)
        if B.per_group:
            # Tokens after the last group have no scale.
            tile_scale = gl.load(scale + part, mask=first < last, other=0.0)
        if B.all_live or row + WAVE * _WAVE + LAST < end:
            acc0, acc1, stage, phase = _accumulate(
                B.waves, CONSUMER, tile_scale, rings, stage, phase, first, last, M, B
            )
        elif B.waves == 2 and row + WAVE * _WAVE < end:
            acc0, acc1, stage, phase = _accumulate(1, CONSUMER, tile_scale, rings, stage, phase, first, last, M, B)
        else:
            acc0, acc1, stage, phase = _accumulate(0, CONSUMER, tile_scale, rings, stage, phase, first, last, M, B)
        # Loaded while this tile is written.
        entry = load_entry(tile + step, entries, groups, M, N, B)
        row += WAVE * _WAVE
        if B.copy_out and B.along == "m":
            # Wait for all copies of the previous tile, because not every wave had one.
            tma.store_wait(0)
        staging = out_ring.index(CONSUMER * B.waves) if B.copy_out else out_ring
        _write(acc0, MMA, staging, out, bias_ptr, groups, part, row, start, end, column, M, N, B)
        if B.waves == 2:
            row += B.stride * _WAVE
            staging = out_ring.index(CONSUMER * B.waves + 1) if B.copy_out else out_ring
            _write(acc1, MMA, staging, out, bias_ptr, groups, part, row, start, end, column, M, N, B)
    if B.copy_out:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "K"])
def matmul_kernel(
    a,  # descriptor of [M, K] e4m3, or bf16 where B.decoded
    a_scale,  # descriptor of [K/block, M] f32; decoded: pointer to a's tensor scale
    b,  # descriptor of [N, K] like a, along "m" of [E·N, K]
    b_scale,  # descriptor of [K/block, N] f32; B.b_square: pointer to [N/block, K/block] f32, along "m" [E, ..];
    # decoded: pointer to b's tensor scale, B.per_group to [E], the products of both tensor scales
    bias_ptr,  # [N], read where B.has_bias; None with groups
    schedule,  # [entries, 4] int32, of `ops/groups/tables`; None without groups
    out,  # descriptor where B.copy_out, else pointer, of [splits, M, N], along "k" of [E·M, N]
    out_ptr,  # the same output; None without groups
    M,
    N,
    K,
    B: gl.constexpr,  # a Build
):
    # Partitions do not support None, so unused arguments are replaced with others.
    groups = ()
    if B.along != "":
        groups, bias_ptr = (schedule, out_ptr), schedule
    # If blocks are square, a tile of b has one scale.
    gl.static_assert(B.block % B.tile_n == 0 or not B.b_square)
    make_barriers(B.stages, _WARPS * B.consumers)
    a_ring = gl.allocate_shared_memory(a.dtype, [B.stages * B.copies, B.copied_rows, B.depth], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [B.stages, B.tile_n, B.depth], b.layout)
    a_scale_ring = a_ring
    if not B.decoded:
        a_scale_ring = gl.allocate_shared_memory(gl.float32, [B.stages * B.copies, 1, B.copied_rows], a_scale.layout)
    b_scale_ring = a_scale_ring
    if not (B.b_square or B.decoded):
        b_scale_ring = gl.allocate_shared_memory(gl.float32, [B.stages, 1, B.tile_n], b_scale.layout)
    out_ring = a_scale_ring
    if B.copy_out:
        out_ring = gl.allocate_shared_memory(out.dtype, [B.all_waves, _WAVE, B.tile_n], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [B.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = B.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    rings = (a_ring, a_scale_ring, b_ring, b_scale_ring, full)
    operands = (a, a_scale, b, b_scale)
    scale = b_scale
    if B.decoded and not B.per_group:
        scale = gl.load(a_scale) * gl.load(b_scale)
    if B.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (0, scale, out, out_ring, bias_ptr, rings, groups, M, N, K, B)),
                (_produce, (operands, rings, groups, M, N, K, B)),
            ],
            [1],
            [_PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(B.consumers == 2)
        gl.warp_specialize(
            [
                (_consume, (0, scale, out, out_ring, bias_ptr, rings, groups, M, N, K, B)),
                (_consume, (1, scale, out, out_ring, bias_ptr, rings, groups, M, N, K, B)),
                (_produce, (operands, rings, groups, M, N, K, B)),
            ],
            [_WARPS, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )
