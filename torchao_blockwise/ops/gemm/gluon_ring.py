"""The ring of stages of `gluon_pipeline.py`, as those who multiply see it: its order, the waves in it, their layout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.ops.gemm.builds import WAVE_ROWS

WARPGROUP = 4
_WAVE: gl.constexpr = gl.constexpr(WAVE_ROWS)
# Bytes of K that a wgmma multiplies.
_MMA_BYTES = 32


@gluon.constexpr_function
def accumulator_layout(build):
    splits = {"cga_layout": [[0, 1]]} if build.ctas == 2 else {}
    instruction = [16, build.tile_n, _MMA_BYTES // build.itemsize]
    return gl.NVMMADistributedLayout([3, 0], [WARPGROUP, 1], instruction, **splits)


@gluon.constexpr_function
def first_wave(consumer, build):
    """The first of a consumer's waves in a tile."""
    return consumer * (build.waves if build.stride == 1 else 1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The following stage of the ring, and the parity of its barriers' phase."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def previous_stage(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def wave_of(ring, stage, WAVE: gl.constexpr, B: gl.constexpr):
    """A wave of the tile of a in a stage."""
    if B.copies == 1:
        rows = ring.index(stage).slice(WAVE * _WAVE, _WAVE)
    else:
        rows = ring.index(stage * B.copies + WAVE)
    return rows
