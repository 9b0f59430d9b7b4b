"""Each kernel is built once, for Hopper: no spills, and instructions that round as the reference does. Needs no GPU.

All builds, for each GPU, are slow: the files of `MODULES`.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

import torchao_blockwise

pytest.importorskip("triton")

import kernel_builds

MODULES = ["kernel_builds", "gemm_builds", "fused_kernel_builds", "quantize_builds"]


def test_each_kernel_builds_for_hopper():
    modules = [f"test_{name}" for name in MODULES]
    rows = kernel_builds.built_for(modules, [90], once=True)[90]
    kernel_builds.assert_sound(rows, 90)
    source = "\n".join(path.read_text() for path in Path(torchao_blockwise.__file__).parent.rglob("*.py"))
    assert Counter(row["kernel"] for row in rows) == Counter(re.findall(r"^def (\w+_kernel)\(", source, re.M))


_TO_FP8 = "cvt.rn.satfinite.e4m3x2.f32 \t%rs1, %r1, %r2;\n"
HAZARDS = {
    "nan": (_TO_FP8 + "min.NaN.f32 \t%r3, %r4, %r5;", ["min.NaN.f32"]),
    "another fp8": ("cvt.rn.satfinite.e5m2x2.f32 \t%rs1, %r1, %r2;\nmax.NaN.f32 \t%r3, %r4, %r5;", ["max.NaN.f32"]),
    "immediate": (
        _TO_FP8 + "add.s16x2 \t%r36, %r34, %r35;\nadd.s16x2 \t%r37, %r33, %r35;",
        ["add.s16x2 of %r35 in 2 places"],
    ),
    "immediate first": (
        _TO_FP8 + "add.s16x2 \t%r36, %r35, %r34;\nadd.s16x2 \t%r37, %r33, %r35;",
        ["add.s16x2 of %r35 in 2 places"],
    ),
    "doubled": (_TO_FP8 + "add.s16x2 \t%r36, %r34, %r34;\nmin.f32 \t%r3, %r4, %r5;", []),
    "no fp8": ("min.NaN.f32 \t%r3, %r4, %r5;\ncvt.rn.bf16x2.f32 \t%r6, %r1, %r2;", []),
}


@pytest.mark.parametrize(("ptx", "found"), HAZARDS.values(), ids=HAZARDS)
def test_instructions_that_ptxas_12_9_miscompiles_are_found(ptx, found):
    """`built_for` refuses them in every build."""
    assert kernel_builds.ptxas_12_9_hazards(ptx) == found
