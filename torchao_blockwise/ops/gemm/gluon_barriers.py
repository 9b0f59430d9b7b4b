"""Barriers of `gluon_pipeline.py` by which consumers free stages of the ring, each warp for itself.

Gluon's `mbarrier.arrive` is an arrival of one thread, before which the compiler has all warps of the partition wait for
each other, and again before the next access to shared memory: a third of the consumers' time. Nor does it wait for
loads from shared memory whose results nobody has used yet: on an H200 the copy of a later block overtook a load of
scales, where many stores to `out` were queued before it. So here each warp arrives by itself, and with
`free_stage_after` not before the loads that it names have come.

Gluon tells no address of its barriers, so these lie in memory declared in PTX: one for each stage, 8 bytes apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A whole kibibyte, so that what Triton allocates behind it keeps the alignment that swizzles ask for.
_DECLARE: gl.constexpr = gl.constexpr(".shared .align 1024 .b8 free_stages[1024];\nmov.b32 $0, 0;")


@gluon.constexpr_function
def _asm(code, index, outputs=1):
    """PTX that has `bar`, the address of the barrier of this number; its outputs are of no use."""
    registers = ".reg .pred leader, done; .reg .b32 bar, read, remote;"
    address = f"mov.b32 bar, free_stages; mad.lo.u32 bar, {index}, 8, bar;"
    results = "".join(f"mov.b32 ${i}, 0;" for i in range(outputs))
    return "{" + registers + address + code + results + "}"


@gluon.constexpr_function
def _init():
    first = "mov.b32 read, %tid.x; setp.eq.u32 leader, read, 0;"
    return _asm(first + "@leader mbarrier.init.shared::cta.b64 [bar], $2;", "$1")


@gluon.constexpr_function
def _arrival(ctas):
    """By one thread of the warp, which is not asked for by its number: that would take a register, or a wait."""
    leader = "elect.sync _|leader, 0xffffffff;"
    if ctas == 1:
        return leader + "@leader mbarrier.arrive.release.cta.shared::cta.b64 _, [bar];"
    both = ""
    for rank in (0, 1):
        both += f"@leader mapa.shared::cluster.u32 remote, bar, {rank};"
        both += "@leader mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];"
    return leader + both


@gluon.constexpr_function
def _arrive(ctas):
    return _asm(_arrival(ctas), "$1")


@gluon.constexpr_function
def _arrive_after(values, ctas):
    """Arrive, at an address that cannot be known before these values are there. Inputs: values, number, 0 of each."""
    read = f"mov.b32 read, ${values};" + "".join(f"or.b32 read, read, ${values + i};" for i in range(1, values))
    read += f"and.b32 read, read, ${3 * values}; add.u32 bar, bar, read;"
    return _asm(read + _arrival(ctas), f"${2 * values}", values)


@gluon.constexpr_function
def _wait(ctas):
    scope = "cta" if ctas == 1 else "cluster"
    wait = f"mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [bar], $2;"
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
    """Declare the barriers of a ring, each of which completes a phase with so many arrivals. Before all else."""
    _run(_DECLARE, [], 1, 0)
    for stage in gl.static_range(STAGES):
        _run(_init(), [gl.to_tensor(stage), gl.to_tensor(arrivals)], 1, 2)


@gluon.jit
def free_stage(stage, ctas: gl.constexpr):
    """Each warp of a consumer: it needs this stage no more, on either multiprocessor of a pair."""
    _run(_arrive(ctas), [stage], 1, 1)


@gluon.jit
def free_stage_after(values, per_thread: gl.constexpr, stage, zero, ctas: gl.constexpr):
    """`free_stage`, but not before loads of these f32 `values` have come, so many a thread.

    zero: an int32 that is 0, which the compiler must not know.
    """
    ASM: gl.constexpr = _arrive_after(per_thread, ctas)
    _run(ASM, [values.to(gl.int32, bitcast=True), stage, zero], per_thread, 3 * per_thread)


@gluon.jit
def wait_for_stage(stage, phase, ctas: gl.constexpr):
    """Wait until the phase of this parity, in which consumers free a stage, is complete."""
    _run(_wait(ctas), [stage, phase], 1, 2)
