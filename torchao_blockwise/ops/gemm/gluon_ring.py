"""The ring of stages of `gluon_pipeline.py`: its order, the waves of a stage, and the barriers that free stages.

Gluon's `mbarrier.arrive` is an arrival of one thread, before which the compiler has all warps of the partition wait for
each other, and again before the next access to shared memory: a third of the consumers' time. Nor does it wait for
loads from shared memory whose results nobody has used yet: on an H200 the copy of a later block overtook a load of
scales, where many stores to `out` were queued before it. So here each warp arrives by itself, and with
`free_stage_after` not before the loads that it names have come.

Gluon tells no address of its barriers, so these lie in memory declared in PTX: one for each stage, 8 bytes apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchao_blockwise.ops.gemm.builds import WAVE_ROWS

WARPGROUP = 4
_WAVE: gl.constexpr = gl.constexpr(WAVE_ROWS)
# Bytes of K that a wgmma multiplies.
_MMA_BYTES = 32
# A whole kibibyte, so that what Triton allocates behind it keeps the alignment that swizzles ask for.
_DECLARE: gl.constexpr = gl.constexpr(".shared .align 1024 .b8 free_stages[1024];\nmov.b32 $0, 0;")


@gluon.constexpr_function
def accumulator_layout(build):
    instruction = [16, build.tile_n, _MMA_BYTES // build.itemsize]
    return gl.NVMMADistributedLayout([3, 0], [WARPGROUP, 1], instruction)


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
def wave_of(ring, stage, WAVE: gl.constexpr, B: gl.constexpr):
    """A wave of the tile of a in a stage."""
    if B.copies == 1:
        rows = ring.index(stage).slice(WAVE * _WAVE, _WAVE)
    else:
        rows = ring.index(stage * B.copies + WAVE)
    return rows


# --- barriers that free stages ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _asm(code, index, outputs=1):
    """PTX that has `bar`, the address of the barrier of this number; its outputs are of no use."""
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
    """By one thread of the warp, which is not asked for by its number: that would take a register, or a wait.

    values: how many loads must have come first. The address cannot be known before they have: it is a sum with them,
    masked by zero. Inputs: the values, the barrier's number, and 0, as often as there are values.
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
    """Declare the barriers of a ring, each of which completes a phase with this number of arrivals. Before all else."""
    _run(_DECLARE, [], 1, 0)
    for stage in gl.static_range(STAGES):
        _run(_init(), [gl.to_tensor(stage), gl.to_tensor(arrivals)], 1, 2)


@gluon.jit
def free_stage(stage):
    """Each warp of a consumer: it needs this stage no more."""
    _run(_arrive(), [stage], 1, 1)


@gluon.jit
def free_stage_after(values, per_thread: gl.constexpr, stage, zero):
    """`free_stage`, but not before loads of these f32 `values` have come, `per_thread` of them a thread.

    zero: an int32 that is 0, which the compiler must not know.
    """
    ASM: gl.constexpr = _arrive(per_thread)
    _run(ASM, [values.to(gl.int32, bitcast=True), stage, zero], per_thread, 3 * per_thread)


@gluon.jit
def wait_for_stage(stage, phase):
    """Wait until the phase of this parity, in which consumers free a stage, is complete."""
    _run(_wait(), [stage, phase], 1, 2)
