"""The emulator of PTX: what it computes by hand-written PTX, and that it refuses what a GPU would leave to chance."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_emulator import Kernel, PtxError

pytestmark = pytest.mark.slow
THREADS = 32
# Each thread has its own 4 bytes: of `in` at %rd2, of `out` at %rd4, of shared memory at %r2.
BEGIN = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd3, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd2, %rd1, %rd5;
    add.s64 %rd4, %rd3, %rd5;
    shl.b32 %r2, %r1, 2;
    setp.lt.u32 %p1, %r1, 7;
    ld.global.b32 %r3, [%rd2];
"""
STORE = """
    st.global.b32 [%rd4], %r4;
    ret;
}
"""


def run(body: str, values: np.ndarray | None = None) -> np.ndarray:
    """%r4 of each thread after `body`, where %r3 is a thread's value; its number by default."""
    values = np.arange(THREADS, dtype=np.uint32) if values is None else values
    out = np.zeros(THREADS, np.uint32)
    Kernel(BEGIN + body + STORE, THREADS, 4 * THREADS).run(1, {"in": values, "out": out})
    return out


def floats(*values: float) -> np.ndarray:
    return np.resize(np.array(values, np.float32), THREADS).view(np.uint32)


NUMBERS = np.arange(THREADS, dtype=np.uint32)
# What kernels do not show to be right by their results.
COMPUTED = {
    "a guard": ("mov.b32 %r4, 5;\n@%p1 mov.b32 %r4, 6;", np.where(NUMBERS < 7, 6, 5)),
    "signed division": ("sub.s32 %r5, %r3, 9;\ndiv.s32 %r4, %r5, 4;", np.trunc((NUMBERS.astype(int) - 9) / 4)),
    "a shift of all bits": ("shr.u32 %r4, %r3, 32;", NUMBERS * 0),
    "a signed field": ("bfe.s32 %r4, %r3, 0, 2;", (NUMBERS.astype(int) + 2) % 4 - 2),
    "bytes": ("prmt.b32 %r4, %r3, 0x11223344, 0x4567;", np.full(THREADS, 0x44332211)),
    "shared memory of the program": (
        "st.shared::cta.b32 [%r2], %r3;\nbar.sync 0;\nld.shared::cta.b32 %r4, [%r2];",
        NUMBERS,
    ),
    "no bytes of a copy": (
        "selp.b32 %r5, 4, 0, %p1;\ncp.async.ca.shared.global [%r2], [%rd2], 4, %r5;\ncp.async.commit_group;\n"
        "cp.async.wait_group 0;\nld.shared.b32 %r4, [%r2];",
        np.where(NUMBERS < 7, NUMBERS, 0),
    ),
}


@pytest.mark.parametrize(("body", "expected"), COMPUTED.values(), ids=COMPUTED)
def test_computes(body, expected):
    assert run(body).tolist() == expected.astype(np.int64).astype(np.uint32).tolist()


def test_floats_round_and_make_nan_as_a_gpu_does():
    values = floats(3.0, 0.0, np.inf, np.nan, -3e-45)
    got = run("div.rn.f32 %r4, %r3, 0f40400000;", values)[:5].tolist()
    assert got == [0x3F800000, 0, 0x7F800000, 0x7FFFFFFF, 0x80000001]


def test_e4m3_saturates_and_rounds_ties_to_even():
    values = floats(1e9, -np.inf, -np.nan, 17.0, 19.0, 2.0**-10, -0.0)
    got = run("cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, 0f3F800000;\ncvt.u32.u16 %r4, %rs1;", values)[:7]
    assert [code >> 8 for code in got.tolist()] == [0x7E, 0xFE, 0x7F, 0x58, 0x5A, 0x00, 0x80]
    assert {code & 0xFF for code in got.tolist()} == {0x38}


REFUSED = {
    "an unknown instruction": ("sin.approx.f32 %r4, %r3;", "does not know 'sin.approx.f32'"),
    "what nothing wrote": ("mov.b32 %r4, %r8;", "%r8 is read and nothing wrote it"),
    "half a word that nothing wrote": ("mov.b32 %r4, {%rs1, %rs2};", "%rs1 is read"),
    "behind a buffer": ("ld.global.b32 %r4, [%rd2+4];", "4 bytes at byte 128 of in: it has 128"),
    "before a buffer": ("ld.global.b32 %r4, [%rd4+-4];", "4 bytes at byte 1099511627772 of in"),
    "no buffer": ("ld.global.b32 %r4, [%rd5];", "address 0x0 lies in no buffer"),
    "behind shared memory": ("ld.shared.b32 %r4, [%r2+4];", "4 bytes at byte 128 of shared memory"),
    "off its own size": ("ld.shared.b32 %r4, [%r2+2];", "at byte 2 of shared memory"),
    "threads that part": ("@%p1 bra $L;\n$L:", "threads part at bra"),
    "a part of a warp": ("@%p1 redux.sync.max.s32 %r4, %r3, -1;", "redux.sync.max.s32 by a part of the threads"),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(body, message):
    with pytest.raises(PtxError, match=message):
        run(body)


UNDEFINED = {
    "shared memory": "ld.shared.b32 %r4, [%r2];",
    "a copy not waited for": "cp.async.ca.shared.global [%r2], [%rd2], 4;\nld.shared.b32 %r4, [%r2];",
    "a copy of the group waited for last": (
        "cp.async.ca.shared.global [%r2], [%rd2], 4;\ncp.async.commit_group;\ncp.async.wait_group 1;\n"
        "ld.shared.b32 %r4, [%r2];"
    ),
    "a register behind a guard": "setp.lt.u32 %p2, %r1, 0;\n@%p2 mov.b32 %r4, %r3;",
}


@pytest.mark.parametrize("body", UNDEFINED.values(), ids=UNDEFINED)
def test_what_is_not_written_yet_is_garbage(body):
    assert set(run(body).tolist()) == {0xABABABAB}
