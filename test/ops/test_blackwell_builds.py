"""NVFP4 for Blackwell, built without one: FP4 instructions in machine code, no spills, scales moved 16 bytes wide."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

BLACKWELL = 100
# All instructions are counted, as the GPU has them.
DISASSEMBLED = True


def cases(target: int):
    """(label, call of a launcher): plain products, one of each direction of groups, what lays scales out, zeros."""
    import torch

    from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, Groups
    from torchao_blockwise.ops.gemm import kernels_blackwell as blackwell
    from torchao_blockwise.ops.gemm import kernels_triton as gemm

    gemm.compute_capability = lambda device: divmod(target, 10)
    operand, ends = kernel_builds.operand, torch.zeros(8, dtype=torch.int32)

    def product(m):
        a, b = operand(NVFP4_1X16, m, 1024), operand(NVFP4_16X16, 512, 1024)
        return f"product {m}", lambda: gemm.matmul(a, b, torch.bfloat16, None)

    def product_of_groups(along):
        a = operand(NVFP4_1X16, 512, 1024)
        b = operand(NVFP4_16X16, 8, 512, 1024) if along == "m" else operand(NVFP4_1X16, 512, 1024)
        return f"product groups {along}", lambda: gemm.grouped_matmul(a, b, Groups(ends), along, torch.bfloat16)

    def swizzle(fmt, m, k):
        return f"swizzle {fmt.name} {m}x{k}", lambda: blackwell.swizzled_scales(operand(fmt, m, k))

    yield from (product(m) for m in (16, 512))
    yield from (product_of_groups(along) for along in "mk")
    for fmt in (NVFP4_1X16, NVFP4_16X16):
        yield from (swizzle(fmt, m, k) for m, k in ((512, 1024), (531, 1024), (512, 1000)))
    yield "swizzle groups", lambda: blackwell.swizzled_scales_of_groups(operand(NVFP4_1X16, 512, 1024), ends)
    yield "tail", lambda: blackwell.zero_tail_(torch.zeros(512, 1024, dtype=torch.bfloat16), ends)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], (BLACKWELL,))[BLACKWELL]


def test_builds_are_sound(builds):
    kernel_builds.assert_sound(builds, BLACKWELL)


@pytest.mark.parametrize("which", ("16", "512", "m", "k"))
def test_products_are_fp4_instructions_and_no_others(builds, which):
    """UTCOMMA multiplies e2m1 with block scales; UTCQMMA would be 8 bits, UTCHMMA 16."""
    (row,) = kernel_builds.of(builds, "product", which)
    products = {name.split(".")[0] for name in row["sass"] if "MMA" in name}
    assert products == {"UTCOMMA"}


@pytest.mark.parametrize("which", ("nvfp4_1x16", "nvfp4_16x16"))
def test_scales_are_moved_16_bytes_at_a_time_by_one_build(builds, which):
    aligned, ragged, odd = kernel_builds.of(builds, "swizzle", which)
    assert aligned["build"] == ragged["build"] != odd["build"]
    assert {"LDG.E.128", "STG.E.128"} <= aligned["sass"].keys() and "LDG.E.U8" not in aligned["sass"]
    assert "STG.E.128" in odd["sass"]


def test_scales_of_groups_and_zeros_are_moved_16_bytes_at_a_time(builds):
    assert {"LDG.E.128", "STG.E.128"} <= kernel_builds.of(builds, "swizzle", "groups")[0]["sass"].keys()
    assert "STG.E.128" in kernel_builds.of(builds, "tail")[0]["sass"]
