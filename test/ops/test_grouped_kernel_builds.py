"""Grouped products and tables of groups, built for the GPUs they are for, by kernel_builds.py: no GPU."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (80, 90, 100)


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel: shapes are [tokens, N, K] and groups."""
    import torch

    from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Groups
    from torchao_blockwise.ops.gemm import kernels_triton as grouped
    from torchao_blockwise.ops.groups.ends import padded_tokens
    from torchao_blockwise.ops.groups.tables.kernels_triton import group_tables

    grouped.compute_capability = lambda device: divmod(target, 10)

    def case(along, a_fmt, b_fmt, m, n, k, groups, out_dtype, accumulate=False, scaled=False):
        dtype = "accumulate" if accumulate else str(out_dtype)[6:]
        label = f"grouped_{along} {a_fmt.name}·{b_fmt.name} {m}x{n}x{k} E{groups} {dtype}"
        ends = Groups(torch.zeros(groups, dtype=torch.int32))
        if along == "m":
            a, b = kernel_builds.operand(a_fmt, m, k), kernel_builds.operand(b_fmt, groups, n, k)
        else:
            tokens = padded_tokens(m, groups, a_fmt.block[1])
            a, b = kernel_builds.operand(a_fmt, n, tokens), kernel_builds.operand(b_fmt, k, tokens)
        if scaled:
            label = label.replace("grouped_", "scaled_")
            a, b = (x._replace(global_scale=torch.ones(groups)) for x in (a, b))
        if accumulate:
            out = torch.zeros(groups, n, k)
            return label, lambda: grouped.add_matmul(out, a, b, ends)
        return label, lambda: grouped.grouped_matmul(a, b, ends, along, out_dtype)

    for fmt in (FP8_1X128, NVFP4_1X16):
        for groups in (1, 8, 300):
            ends = torch.zeros(groups, dtype=torch.int32)
            for m in (1, 4096, 4112, 4099):
                yield (
                    f"tables {fmt.name} {m} E{groups}",
                    lambda ends=ends, m=m, fmt=fmt: group_tables(ends, m, fmt),
                )
    bf16, f32 = torch.bfloat16, torch.float32
    for a_fmt, b_fmts in ((FP8_1X128, (FP8_128X128, FP8_1X128)), (NVFP4_1X16, (NVFP4_16X16, NVFP4_1X16))):
        for b_fmt in b_fmts:
            # 16, 64 and 512 tokens a group.
            for m in (128, 512, 4096):
                yield case("m", a_fmt, b_fmt, m, 512, 1024, 8, bf16)
            yield case("m", a_fmt, b_fmt, 4096, 512, 1024, 8, f32)
            yield case("m", a_fmt, b_fmt, 4096, 500, 500, 8, bf16)
            yield case("m", a_fmt, b_fmt, 4096, 512, 1024, 300, bf16)
            for m in (4112, 4099):
                yield case("m", a_fmt, b_fmt, m, 512, 1024, 8, bf16)
        one_row = a_fmt, a_fmt
        if a_fmt is NVFP4_1X16:
            for b_fmt in b_fmts:
                for m in (128, 512, 4096):
                    yield case("m", a_fmt, b_fmt, m, 512, 1024, 8, bf16, scaled=True)
            yield case("k", *one_row, 4096, 512, 1024, 8, bf16, scaled=True)
            yield case("k", *one_row, 4096, 512, 1024, 8, f32, accumulate=True, scaled=True)
        for m in (1, 4096, 4112, 4099):
            yield case("k", *one_row, m, 512, 1024, 8, bf16)
        yield case("k", *one_row, 4096, 512, 1024, 8, f32)
        yield case("k", *one_row, 4096, 512, 1024, 8, f32, accumulate=True)
        yield case("k", *one_row, 4096, 500, 500, 300, bf16)
        # Sizes of 1 become constants.
        yield case("m", a_fmt, b_fmts[0], 4096, 1, 500, 1, bf16)
        yield case("k", *one_row, 4096, 500, 1, 1, bf16)
        yield case("k", *one_row, 4096, 1, 500, 1, bf16)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], TARGETS)


targets = pytest.mark.parametrize("target", TARGETS)
ALONG = ("grouped_m", "grouped_k")


TENSOR_CORES = {
    # Decoded to f16.
    80: {"fp8": r"mma\.sync\S*f16\.f16", "nvfp4": r"mma\.sync\S*f16\.f16"},
    90: {"fp8": r"wgmma\.mma_async\S*e4m3\.e4m3", "nvfp4": r"wgmma\.mma_async\S*f16\.f16"},
    100: {"fp8": r"tcgen05\.mma\S*kind::f8f6f4", "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4"},
}


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("element", ("fp8", "nvfp4"))
def test_products_run_on_tensor_cores(builds, target, along, element):
    rows = [row for row in kernel_builds.of(builds[target], along) if row["label"].split()[1].startswith(element)]
    for row in rows:
        # Tiles of 16 rows are too low for the wide instructions; those that FP4 tensor cores multiply have 128.
        low = any(word in row["label"] for word in ((" 128x", "E300") if along == "grouped_m" else ("x1x",)))
        low = low and (target, element) != (100, "nvfp4")
        instruction = TENSOR_CORES[80 if low else target][element]
        assert any(re.match(instruction, i) for i in row["instructions"]), row["label"]


@targets
@pytest.mark.parametrize("along", ALONG)
def test_fp8_payload_is_copied_16_bytes_at_a_time(builds, target, along):
    for row in kernel_builds.of(builds[target], along):
        if " fp8" in row["label"]:
            assert "cp.async.cg" in row["instructions"], row["label"]
            # On Blackwell scales are copied so, too.
            assert target == 100 or "cp.async.ca" not in row["instructions"], row["label"]


@targets
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("pair", ("fp8_1x128·fp8_1x128", "nvfp4_1x16·nvfp4_1x16"))
def test_token_counts_do_not_recompile(builds, target, along, pair):
    shapes = (f"{m}x512x1024" for m in (4096, 4112, 4099))
    rows = [kernel_builds.of(builds[target], along, pair, shape, "E8", "bfloat16")[0] for shape in shapes]
    assert len({row["build"] for row in rows}) == 1


@targets
@pytest.mark.parametrize("fmt", ("fp8_1x128", "nvfp4_1x16"))
@pytest.mark.parametrize("groups", (1, 8, 300))
def test_tables_of_any_number_of_tokens_are_one_build(builds, target, groups, fmt):
    rows = kernel_builds.of(builds[target], "tables", fmt, f"E{groups}")
    assert len(rows) == 4 and len({row["build"] for row in rows}) == 1
