"""The accumulation of `gluon_pipeline.py` for operands that were decoded to bf16 (B.decoded).

bf16 sums need no promotion: wgmma adds to fp32 accumulators over all of K, which are multiplied by both tensor scales
at the end. A stage holds 128 bytes of a row, 64 columns. A consumer, here with two waves w0 and w1, frees a stage after
it has issued the wgmmas of the next one, so that the tensor cores always have work:

    stage       0        1        2
    issued      w0 w1    w0 w1    w0 w1
    freed                0        1        2

Along "k", groups start at multiples of a block, 16 columns, so the last stage of a group may contain columns of the
next one. Of this stage, only the blocks of the group are multiplied, one by one: 16 is also the K of a wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torchao_blockwise.ops.gemm.builds import WAVE_ROWS
from torchao_blockwise.ops.gemm.gluon_ring import accumulator_layout, first_wave, free_stage, next_stage, wave_of

_WAVE: gl.constexpr = gl.constexpr(WAVE_ROWS)


@gluon.jit
def _previous_stage(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _multiply(
    LIVE: gl.constexpr, WAVE: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, OUTSTANDING: gl.constexpr,
    a_ring, b_ring, stage, acc0, acc1, B: gl.constexpr,
):  # fmt: skip
    """Add COUNT columns of a stage, from FIRST on, and wait for all wgmmas except the last OUTSTANDING ones."""
    b = b_ring.index(stage).slice(FIRST, COUNT, 1).permute((1, 0))
    a = wave_of(a_ring, stage, WAVE, B).slice(FIRST, COUNT, 1)
    acc0 = warpgroup_mma(a, b, acc0, is_async=True)
    if LIVE == 2:
        a = wave_of(a_ring, stage, WAVE + B.stride, B).slice(FIRST, COUNT, 1)
        acc1 = warpgroup_mma(a, b, acc1, is_async=True)
    return warpgroup_mma_wait(OUTSTANDING, deps=[acc0, acc1])


@gluon.jit
def accumulate_decoded(
    LIVE: gl.constexpr, CONSUMER: gl.constexpr, scale, rings, stage, phase, first, last, B: gl.constexpr
):
    """Accumulate blocks first .. last of K, times `scale`, for the first LIVE waves of a consumer."""
    a_ring, _, b_ring, _, full = rings
    WAVE: gl.constexpr = first_wave(CONSUMER, B)
    MMA: gl.constexpr = accumulator_layout(B)
    WIDTH: gl.constexpr = B.tile_n
    acc0 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    acc1 = gl.zeros((_WAVE, WIDTH), gl.float32, MMA)
    # Stages that are multiplied whole. After the last column of K, there are zeros.
    end = last
    if B.along == "k":
        end = first + (last - first) // B.stage_blocks * B.stage_blocks
    for k in range(first, end, B.stage_blocks):
        mbarrier.wait(full.index(stage), phase)
        if LIVE == 0:
            free_stage(stage)
        else:
            acc0, acc1 = _multiply(LIVE, WAVE, 0, B.depth, LIVE, a_ring, b_ring, stage, acc0, acc1, B)
            # Not a loop variable, because Triton 3.6 and 3.7 treat one that starts as a copy of `stage` as a constant
            # of the loop.
            if k > first:
                free_stage(_previous_stage(stage, B.stages))
        stage, phase = next_stage(stage, phase, B.stages)
    if LIVE > 0:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        if first < end:
            free_stage(_previous_stage(stage, B.stages))
    if end < last:
        mbarrier.wait(full.index(stage), phase)
        if LIVE > 0:
            BLOCKS: gl.constexpr = B.stage_blocks - 1
            for i in gl.static_range(BLOCKS):
                if end + i < last:
                    acc0, acc1 = _multiply(LIVE, WAVE, i * B.block, B.block, 0, a_ring, b_ring, stage, acc0, acc1, B)
        free_stage(stage)
        stage, phase = next_stage(stage, phase, B.stages)
    # Empty sums are zero even if scales are NaN.
    scale = gl.where(first < last, scale, 0.0)
    return acc0 * scale, acc1 * scale, stage, phase
