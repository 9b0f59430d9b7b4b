"""The Hopper kernels of products, plain and grouped, built by kernel_builds.py: no GPU."""

import re
from pathlib import Path

import pytest

from torchao_blockwise import _compat

if not _compat.has_gluon():
    pytest.skip("needs Gluon, which Triton has from 3.6 on", allow_module_level=True)

import kernel_builds

pytestmark = pytest.mark.slow

TARGET = 90


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.gemm.builds import BUILDS

    for build in BUILDS:
        for b_fmt in (FP8_128X128, FP8_1X128):
            yield from _plain_cases(build, b_fmt)
        yield from _grouped_cases("grouped", FP8_1X128, FP8_128X128, build)
        yield from _grouped_cases("decoded", NVFP4_1X16, NVFP4_16X16, build)


def _tile(build) -> str:
    return f"{build.tile_m}x{build.tile_n}x{build.splits}"


def _plain_cases(build, b_fmt):
    import torch

    from torchao_blockwise.formats import FP8_1X128
    from torchao_blockwise.ops.gemm import kernels_gluon as gluon

    gluon.multiprocessors = lambda device: 132

    def case(m, n, k, out_dtype, bias=None):
        a, b = kernel_builds.operand(FP8_1X128, m, k), kernel_builds.operand(b_fmt, n, k)
        label = f"plain {_tile(build)} {b_fmt.name} {m}x{n}x{k} {str(out_dtype)[6:]}" + " bias" * (bias is not None)
        return label, lambda: gluon.matmul(a, b, out_dtype, bias, build)

    for out_dtype in (torch.bfloat16, torch.float32):
        yield case(512, 512, 1024, out_dtype)
    yield case(512, 512, 1024, torch.bfloat16, torch.zeros(512))
    # Token counts that change, in M and in K.
    yield case(528, 512, 1024, torch.bfloat16)
    yield case(531, 512, 1003, torch.bfloat16)
    yield case(512, 509, 1024, torch.bfloat16)
    a, b = kernel_builds.operand(FP8_1X128, 512, 1024), kernel_builds.operand(b_fmt, 512, 1024)
    out = torch.zeros(512, 512)
    label = f"plain {_tile(build)} {b_fmt.name} adding"
    yield label, lambda: gluon.add_matmul(out, a, b, build=build)


def _grouped_cases(kind, fmt, weight_fmt, build):
    import torch

    from torchao_blockwise.formats import Groups
    from torchao_blockwise.ops.gemm import kernels_gluon as gluon
    from torchao_blockwise.ops.groups.ends import padded_tokens

    gluon.multiprocessors = lambda device: 132

    def case(along, m, n, k, groups, out_dtype, accumulate=False, scaled=False):
        ends = Groups(torch.zeros(groups, dtype=torch.int32))
        dtype = "adding" if accumulate else str(out_dtype)[6:]
        label = f"{kind}_{along} {_tile(build)} {m}x{n}x{k} E{groups} {dtype}"
        if along == "m":
            a, b = kernel_builds.operand(fmt, m, k), kernel_builds.operand(weight_fmt, groups, n, k)
        else:
            columns = padded_tokens(m, groups, fmt.block[1])
            a, b = (kernel_builds.operand(fmt, size, columns) for size in (n, k))
        if scaled:
            label = label.replace(kind, "scaled")
            a, b = (x._replace(global_scale=torch.ones(groups)) for x in (a, b))
        if accumulate:
            return label, lambda: gluon.add_matmul(torch.zeros(groups, n, k), a, b, ends, build)
        return label, lambda: gluon.grouped_matmul(a, b, ends, along, out_dtype, build)

    bf16, f32 = torch.bfloat16, torch.float32
    for along in ("m", "k"):
        for m in (1024, 1040, 1043):
            yield case(along, m, 512, 1024, 4, bf16)
        yield case(along, 1024, 512, 1024, 4, f32)
        yield case(along, 1024, 509, 1003, 4, bf16)
    yield case("k", 1024, 512, 1024, 4, f32, accumulate=True)
    if kind == "decoded":
        for along in ("m", "k"):
            yield case(along, 1024, 512, 1024, 4, bf16, scaled=True)
        yield case("k", 1024, 512, 1024, 4, f32, accumulate=True, scaled=True)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], (TARGET,))[TARGET]


def products(builds, *words):
    return [row for row in kernel_builds.of(builds, *words) if row["kernel"] == "matmul_kernel"]


KINDS = ("plain", "grouped_m", "grouped_k", "decoded_m", "decoded_k")
grouped_kinds = pytest.mark.parametrize("kind", KINDS[1:])
kinds = pytest.mark.parametrize("kind", KINDS)


def test_builds_are_sound(builds):
    kernel_builds.assert_sound(builds, TARGET)


@kinds
def test_products_run_on_tensor_cores(builds, kind):
    element = r"bf16\.bf16" if kind.startswith("decoded") else r"e4m3\.e4m3"
    for row in products(builds, kind):
        assert any(re.match(rf"wgmma\.mma_async\S*{element}", i) for i in row["instructions"]), row["label"]


@kinds
def test_products_fit_in_shared_memory(builds, kind):
    for row in products(builds, kind):
        assert row["SHARED"] <= 227 * 1024, row["label"]


@grouped_kinds
def test_each_partition_loads_the_entry_of_each_tile(builds, kind):
    """Triton 3.6 and 3.7 lost the producer's loads from a `for`: its tiles were all the first, and the kernel hung."""
    for row in products(builds, kind):
        loads = row["loads_in_loops"]
        assert len(loads) >= 2 and min(loads) >= {"m": 4, "k": 2}[kind[-1]], row["label"]


def test_token_counts_do_not_rebuild_products(builds):
    for tile in {row["label"].split()[1] for row in products(builds, "plain")}:
        for fmt in ("fp8_128x128", "fp8_1x128"):
            shapes = ("512x512x1024", "528x512x1024", "531x512x1003")
            rows = [products(builds, "plain", tile, fmt, shape, "bfloat16")[0] for shape in shapes]
            assert len({row["build"] for row in rows}) == 1


@grouped_kinds
def test_token_counts_do_not_rebuild_grouped_products_or_schedules(builds, kind):
    for tile in {row["label"].split()[1] for row in products(builds, kind)}:
        rows = [
            row
            for m in (1024, 1040, 1043)
            for row in kernel_builds.of(builds, kind, tile, f"{m}x512x1024", "E4", "bfloat16")
        ]
        kernels = {row["kernel"] for row in rows} - {"_decode_kernel"}
        assert len({row["build"] for row in rows if row["kernel"] in kernels}) == len(kernels) == 2
