"""The ring of stages of `gluon_pipeline.py`: the order of stages, their waves, and the barriers that free them.

`mbarrier.arrive` of Gluon is the arrival of one thread. Before it, and again before the next access to shared memory,
the compiler lets all warps of the partition wait for each other, which takes a third of the consumers' time. It also
does not wait for loads from shared memory whose results are not used yet: on an H200, the copy of a later block
overtook a load of scales that was queued after many stores to `out`. So here each warp arrives separately, and
`free_stage_after` arrives only after the given loads are complete.

Gluon does not expose the addresses of its barriers, so these are in memory declared in PTX, 8 bytes for each stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.ops.gemm.builds import WAVE_ROWS

WARPGROUP = 4
_WAVE: gl.constexpr = gl.constexpr(WAVE_ROWS)
# Bytes of K that a wgmma multiplies.
_MMA_BYTES = 32
# 1 KiB, so that memory that Triton allocates after it has the alignment that swizzles need.
_DECLARE: gl.constexpr = gl.constexpr(".shared .align 1024 .b8 free_stages[1024];\nmov.b32 $0, 0;")


@gluon.constexpr_function
def accumulator_layout(build):
    instruction = [16, build.tile_n, _MMA_BYTES // build.itemsize]
    return gl.NVMMADistributedLayout([3, 0], [WARPGROUP, 1], instruction)


@gluon.constexpr_function
def first_wave(consumer, build):
    """Return the first wave of a consumer in a tile."""
    return consumer * (build.waves if build.stride == 1 else 1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring, and the parity of the phase of its barriers."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def wave_of(ring, stage, WAVE: gl.constexpr, B: gl.constexpr):
    """Return a wave of the tile of a in a stage."""
    if B.copies == 1:
        rows = ring.index(stage).slice(WAVE * _WAVE, _WAVE)
    else:
        rows = ring.index(stage * B.copies + WAVE)
    return rows


# --- barriers that free stages ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _asm(code, index, outputs=1):
    """Return PTX with `bar`, the address of the barrier with this index; its outputs are unused."""
    registers = ".reg .pred leader, done; .reg .b32 bar, read;"
    address = f"mov.b32 bar, free_stages; mad.lo.u32 bar, {index}, 8, bar;"
    results = "".join(f"mov.b32 ${i}, 0;" for i in range(outputs))
    return "{" + registers + address + code + results + "}"


@gluon.constexpr_function
def _init():
    first = "mov.b32 read, %tid.x; setp.eq.u32 leader, read, 0;"
    return _asm(first + "@leader mbarrier.init.shared::cta.b64 [bar], $2;", "$1")


@gluon.constexpr_function
def _arrive(values=0):
    """Return the arrival of one thread of the warp, elected, because its index would take a register or a wait.

    values: the number of loads that must be complete. The address depends on them: they are masked with zero and added
        to it. Inputs: the values, the barrier's index, and 0, each as many times as there are values.
    """
    wait = ""
    if values:
        read = f"mov.b32 read, ${values};" + "".join(f"or.b32 read, read, ${values + i};" for i in range(1, values))
        wait = read + f"and.b32 read, read, ${3 * values}; add.u32 bar, bar, read;"
    arrive = "elect.sync _|leader, 0xffffffff;@leader mbarrier.arrive.release.cta.shared::cta.b64 _, [bar];"
    return _asm(wait + arrive, f"${2 * values or 1}", values or 1)


@gluon.constexpr_function
def _wait():
    wait = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [bar], $2;"
    return _asm(f"again: {wait} @!done bra again;", "$1")


@gluon.constexpr_function
def _constraints(outputs, inputs):
    return ",".join(["=r"] * outputs + ["r"] * inputs + ["~{memory}"])


@gluon.jit
def _run(ASM: gl.constexpr, args, outputs: gl.constexpr, inputs: gl.constexpr):
    CONSTRAINTS: gl.constexpr = _constraints(outputs, inputs)
    gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, dtype=gl.int32, is_pure=False, pack=outputs)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, arrivals: gl.constexpr):
    """Declare the barriers of a ring, whose phases complete with this number of arrivals. Must come first."""
    _run(_DECLARE, [], 1, 0)
    for stage in gl.static_range(STAGES):
        _run(_init(), [gl.to_tensor(stage), gl.to_tensor(arrivals)], 1, 2)


@gluon.jit
def free_stage(stage):
    """Free this stage; each warp of each consumer calls it when it no longer needs the stage."""
    _run(_arrive(), [stage], 1, 1)


@gluon.jit
def free_stage_after(values, per_thread: gl.constexpr, stage, zero):
    """`free_stage` after the loads of these f32 `values`, `per_thread` for each thread, are complete.

    zero: an int32 that is 0, which the compiler must not know.
    """
    ASM: gl.constexpr = _arrive(per_thread)
    _run(ASM, [values.to(gl.int32, bitcast=True), stage, zero], per_thread, 3 * per_thread)


@gluon.jit
def wait_for_stage(stage, phase):
    """Wait until the phase of this parity, in which consumers free a stage, is complete."""
    _run(_wait(), [stage, phase], 1, 2)
