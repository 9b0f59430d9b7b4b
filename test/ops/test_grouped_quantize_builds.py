"""Kernels that quantize tokens in groups, built for the GPUs they are for, by kernel_builds.py: no GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (90, 100)
COPIES = {"rowwise": (True, False), "columnwise": (False, True)}


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel, and beside it the one without groups."""
    import torch

    from torchao_blockwise import _compat
    from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16, CastOptions, Groups
    from torchao_blockwise.ops.fused import kernels_triton as swiglu
    from torchao_blockwise.ops.quantization import kernels_triton as quantize

    def quantize_case(fmt, m, k, groups, dtype=torch.bfloat16):
        x, of = torch.zeros(m, k, dtype=dtype), Groups(torch.zeros(groups, dtype=torch.int32))
        amax_bits = torch.ones(()).view(torch.int32) if fmt.has_global_scale else None
        for name, copies in COPIES.items():
            label, options = f"{fmt.name} {m}x{k} {str(dtype)[6:]} {name}", CastOptions(fmt, *copies)
            yield (
                f"quantize plain {label}",
                lambda options=options: quantize.quantize(x, amax_bits, options),
            )
            yield (
                f"quantize E{groups} {label}",
                lambda options=options: quantize.quantize(x, amax_bits, options, of),
            )

    def swiglu_case(m, k, groups, dtype=torch.bfloat16):
        dh, (gate, up) = torch.zeros(m, k, dtype=dtype), torch.zeros(m, 2 * k, dtype=dtype).chunk(2, 1)
        ends, options = torch.zeros(groups, dtype=torch.int32), CastOptions(FP8_1X128)
        for name, of in (("plain", None), (f"E{groups}", Groups(ends))):
            label = f"{name} {m}x{k} {str(dtype)[6:]} rowwise"
            yield f"swiglu {label}", lambda of=of: swiglu.swiglu_quantize(gate, up, options, of)
            yield (
                f"swiglu_backward {label}",
                lambda of=of: swiglu.swiglu_backward_quantize(dh, gate, up, options, of),
            )

    def scale_per_group_case(m, k, groups, dtype=torch.bfloat16):
        x, of = torch.zeros(m, k, dtype=dtype), Groups(torch.zeros(groups, dtype=torch.int32))
        amax_bits = torch.ones(groups).view(torch.int32)
        for name, copies in COPIES.items():
            options = CastOptions(NVFP4_1X16, *copies, scale_per_group=True)
            label = f"scale_per_group {groups} nvfp4_1x16 {m}x{k} {str(dtype)[6:]} {name}"
            yield label, lambda options=options: quantize.quantize(x, amax_bits, options, of)

    for groups in (8, 256):
        yield from scale_per_group_case(300, 500, groups)
    yield from scale_per_group_case(512, 1024, 8)
    for fmt in (FP8_1X128, NVFP4_1X16):
        yield from quantize_case(fmt, 512, 1024, 8)
        yield from quantize_case(fmt, 512, 1024, 257)
        yield from quantize_case(fmt, 512, 1024, 8, torch.float32)
        yield from quantize_case(fmt, 300, 500, 8)
        # Token counts that change.
        for m in (528, 531, 533):
            yield from quantize_case(fmt, m, 1024, 8)
    if _compat.has_gluon():
        from torchao_blockwise.ops.quantization import kernels_gluon as gluon

        for m in (512, 531):
            x, of = torch.zeros(m, 1024, dtype=torch.bfloat16), Groups(torch.zeros(8, dtype=torch.int32))
            for warps in (4, 8, 16):
                arguments = x, None, CastOptions(FP8_1X128, columnwise=True), of
                label = f"one_read E8 {m}x1024 bfloat16 {warps} warps"
                yield label, lambda of=arguments, warps=warps: gluon.quantize(*of, build=(FP8_1X128.block[1], warps))
    for m, k in ((512, 1024), (512, 1040), (528, 1024), (531, 1024), (533, 1024)):
        yield from swiglu_case(m, k, 8)
    yield from swiglu_case(512, 1024, 8, torch.float32)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], TARGETS)


targets = pytest.mark.parametrize("target", TARGETS)
QUANTIZERS = (
    "_quantize_kernel",
    "_quantize_fp8_kernel",
    "_quantize_nvfp4_kernel",
    "_columnwise_kernel",
    "_swiglu_kernel",
    "_swiglu_backward_kernel",
)


def rows_of(builds, target, *words, kernels=QUANTIZERS):
    return [row for row in kernel_builds.of(builds[target], *words) if row["kernel"] in kernels]


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
def test_payload_is_stored_16_bytes_at_a_time_whatever_the_tokens_are(builds, target):
    """Padded tokens are whole blocks: 531 are stored as 512 are. In NVFP4 a block of them is 8 bytes."""
    for m in (512, 528, 531, 533):
        for row in rows_of(builds, target, "E8", f"{m}x1024"):
            halves = "nvfp4" in row["label"] and "columnwise" in row["label"]
            assert f"st.global.{'b64' if halves else 'v4.b32'}" in row["instructions"], row["label"]


@targets
def test_groups_cost_no_room(builds, target):
    """As many programs of FP8 fit in a multiprocessor with groups as without: registers are given out 8 at a time."""
    for words in (("quantize", "rowwise"), ("quantize", "columnwise"), ("swiglu", "rowwise")):
        words = (*words, "512x1024", "bfloat16")
        plain, grouped = (rows_of(builds, target, of, *words)[0] for of in ("plain", "E8"))
        assert "nvfp4" not in plain["label"] and -(-grouped["REG"] // 8) <= -(-plain["REG"] // 8), words


@targets
def test_token_counts_do_not_recompile(builds, target):
    """Of a columnwise copy alone one build; where rows are written as they lie multiples of 16 and all others."""
    shapes = ("512x1024", "528x1024", "531x1024", "533x1024")

    def count(kernel, *words):
        rows = [rows_of(builds, target, "E8", shape, "bfloat16", *words, kernels=(kernel,)) for shape in shapes]
        return len({row["build"] for found in rows for row in found})

    for fmt in ("fp8_1x128", "nvfp4_1x16"):
        assert count("_group_tables_kernel", fmt) == 1
    assert count("_quantize_fp8_kernel", "fp8_1x128", "columnwise") == 1
    assert count("_columnwise_kernel", "nvfp4_1x16", "columnwise") == 1
    for kernel, fmt in (("_quantize_fp8_kernel", "fp8_1x128"), ("_quantize_nvfp4_kernel", "nvfp4_1x16")):
        assert count(kernel, fmt, "rowwise") <= 2
    for kernel in ("_swiglu_kernel", "_swiglu_backward_kernel"):
        assert count(kernel, "rowwise") <= 2
