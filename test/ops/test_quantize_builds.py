"""Kernels that quantize tokens in groups, transforms and by random bits, built for the GPUs they are for: no GPU."""

import functools

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (90, 100)
targets = pytest.mark.parametrize("target", TARGETS)
SHAPES = ((512, 1024), (528, 1024), (531, 1024), (533, 1024))


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel, and for those of groups the one without."""
    import torch

    from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16, CastOptions, Groups, Place, hadamard_number
    from torchao_blockwise.ops.fused import kernels_triton as swiglu
    from torchao_blockwise.ops.quantization import kernels_amax, kernels_chunks
    from torchao_blockwise.ops.quantization import kernels_triton as quantize

    number, key = hadamard_number(True), torch.zeros(4, dtype=torch.int64)
    bf16, f32 = torch.bfloat16, torch.float32

    def groups_of(count):
        return Groups(torch.zeros(count, dtype=torch.int32))

    def case(name, fmt, m, k, *, groups=0, dtype=bf16, rowwise=False, own=False, hadamard=0, key=None, place=None):
        x, of = torch.zeros(m, k, dtype=dtype), groups_of(groups) if groups else None
        bits = torch.ones(groups if own else ()).view(torch.int32) if fmt.has_global_scale else None
        options = CastOptions(fmt, rowwise, not rowwise, padded=True, hadamard=hadamard, scale_per_group=own)
        label = f"{name} {fmt.name} {m}x{k} {str(dtype)[6:]} {'rowwise' if rowwise else 'columnwise'}"
        label += f" {f'E{groups}' if groups else 'plain'}" + " scales" * own
        return label, lambda: quantize.quantize(x, bits, options, of, key, place)

    def both(name, *args, **options):
        for rowwise in (True, False):
            yield case(name, *args, rowwise=rowwise, **options)

    for fmt in (FP8_1X128, NVFP4_1X16):
        for groups in (0, 8):
            for m, k in SHAPES:
                yield from both("quantize", fmt, m, k, groups=groups)
            yield from both("quantize", fmt, 512, 1024, groups=groups, dtype=f32)
            yield from both("quantize", fmt, 300, 500, groups=groups)
        yield from both("quantize", fmt, 512, 1024, groups=257)
    for groups in (8, 256):
        yield from both("quantize", NVFP4_1X16, 300, 500, groups=groups, own=True)
        x, of = torch.zeros(512, 1024, dtype=bf16), groups_of(groups)
        label, amax_bits = f"E{groups} scales 512x1024", kernels_amax.tensor_amax_bits
        yield f"amaxes {label}", functools.partial(kernels_chunks.hadamard_amax_bits, x, number, of, True)
        yield f"amaxes_of_groups {label}", functools.partial(amax_bits, x, of.ends, True)
        yield f"amaxes_of_matrices {label}", functools.partial(amax_bits, x.view(2, 256, 1024), None, True)
        yield f"scales {label}", functools.partial(kernels_amax.global_scale, torch.ones(groups).view(torch.int32))
    for groups in (0, 8):
        for m, k in SHAPES:
            of = groups_of(groups) if groups else None
            label = f"amaxes {m}x{k} {f'E{groups}' if groups else 'plain'}"
            x = torch.zeros(m, k, dtype=bf16)
            yield label, functools.partial(kernels_chunks.hadamard_amax_bits, x, number, of, False)
            for dtype in (bf16, f32) if m == 512 else (bf16,):
                of = {"groups": groups, "dtype": dtype, "own": bool(groups) and m == 528}
                yield case("transformed", NVFP4_1X16, m, k, hadamard=number, **of)
                yield case("both", NVFP4_1X16, m, k, hadamard=number, key=key, **of)
                yield case("rounded", NVFP4_1X16, m, k, key=key, **of)
                yield case("rounded", NVFP4_1X16, m, k, rowwise=True, key=key, **of)
        place = Place(0, 128, 7, 99)
        yield case("both", NVFP4_1X16, 512, 1024, groups=groups, hadamard=number, key=key, place=place)

    def one_read(x, warps):
        from torchao_blockwise.ops.quantization import kernels_gluon

        kernels_gluon.BOTH = FP8_1X128.block[1], warps
        kernels_gluon.quantize(x, None, CastOptions(FP8_1X128, columnwise=True), groups_of(8))

    x, options = (
        torch.zeros(512, 1024, dtype=bf16),
        CastOptions(FP8_1X128, True, True, columnwise_format_name="fp8_128x128"),
    )
    yield "quantize squares 512x1024 E8", functools.partial(quantize.quantize, x, None, options, groups_of(8))
    for m in (512, 531):
        for warps in (4, 8, 16):
            x = torch.zeros(m, 1024, dtype=bf16)
            yield f"one_read E8 {m}x1024 bfloat16 {warps} warps", functools.partial(one_read, x, warps)

    def swiglu_cases(m, k, groups, dtype=bf16):
        dh, (gate, up) = torch.zeros(m, k, dtype=dtype), torch.zeros(m, 2 * k, dtype=dtype).chunk(2, 1)
        of, label = groups_of(groups) if groups else None, f"{f'E{groups}' if groups else 'plain'} {m}x{k}"
        label, rest = f"{label} {str(dtype)[6:]} rowwise", (CastOptions(FP8_1X128), of)
        yield f"swiglu {label}", lambda: swiglu.swiglu_quantize(gate, up, *rest)
        yield f"swiglu_backward {label}", lambda: swiglu.swiglu_backward_quantize(dh, gate, up, *rest)

    for groups in (0, 8):
        for m, k in (*SHAPES, (512, 1040)):
            yield from swiglu_cases(m, k, groups)
        yield from swiglu_cases(512, 1024, groups, f32)


QUANTIZERS = {
    "_quantize_kernel",
    "_quantize_fp8_kernel",
    "_quantize_nvfp4_kernel",
    "_columnwise_kernel",
    "_swiglu_kernel",
    "_swiglu_backward_kernel",
}


def rows_of(builds, target, *words, kernels=QUANTIZERS):
    return [row for row in kernel_builds.of(builds[target], *words) if row["kernel"] in kernels]


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
def test_payload_is_stored_16_bytes_at_a_time_whatever_the_tokens_are(builds, target):
    """Padded tokens are whole blocks: 531 are stored as 512 are. In NVFP4 a block of them is 8 bytes."""
    for m, k in SHAPES:
        for row in rows_of(builds, target, "E8", f"{m}x{k}"):
            halves = "nvfp4" in row["label"] and "columnwise" in row["label"]
            assert f"st.global.{'b64' if halves else 'v4.b32'}" in row["instructions"], row["label"]


@targets
def test_groups_cost_no_room(builds, target):
    """As many programs of FP8 fit in a multiprocessor with groups as without: registers are given out 8 at a time."""
    for words in (("quantize", "fp8_1x128", "rowwise"), ("quantize", "fp8_1x128", "columnwise"), ("swiglu", "rowwise")):
        words = (*words, "512x1024", "bfloat16")
        plain, grouped = (rows_of(builds, target, of, *words)[0] for of in ("plain", "E8"))
        assert -(-grouped["REG"] // 8) <= -(-plain["REG"] // 8), words


def count(builds, target, kernel, *words):
    """How many builds token counts make."""
    rows = [rows_of(builds, target, f"{m}x{k}", *words, kernels=(kernel,)) for m, k in SHAPES]
    return len({row["build"] for found in rows for row in found if "scales" not in row["label"]})


@targets
def test_token_counts_do_not_recompile(builds, target):
    """Of only a columnwise copy one build; where rows are written as they lie multiples of 16 and all others."""
    for fmt in ("fp8_1x128", "nvfp4_1x16"):
        assert count(builds, target, "_group_tables_kernel", "quantize", fmt, "E8", "bfloat16") == 1
    for kernel, words in {"_quantize_fp8_kernel": ("fp8_1x128",), "_columnwise_kernel": ("nvfp4_1x16",)}.items():
        assert count(builds, target, kernel, "quantize", *words, "columnwise", "E8", "bfloat16") == 1
    for kernel, fmt in (("_quantize_fp8_kernel", "fp8_1x128"), ("_quantize_nvfp4_kernel", "nvfp4_1x16")):
        assert count(builds, target, kernel, "quantize", fmt, "rowwise", "E8", "bfloat16") <= 2
    for kernel, name in (("_swiglu_kernel", "swiglu"), ("_swiglu_backward_kernel", "swiglu_backward")):
        assert count(builds, target, kernel, name, "rowwise", "E8", "bfloat16") <= 2


@targets
def test_token_counts_and_places_make_few_builds(builds, target):
    for kernel, *words in (
        ("_columnwise_kernel", "transformed", "bfloat16"),
        ("_columnwise_kernel", "both", "bfloat16"),
        ("_columnwise_kernel", "rounded", "bfloat16"),
        ("_rowwise_kernel", "rounded", "bfloat16"),
        ("_amaxes_kernel", "amaxes"),
    ):
        # Columnwise scales are stored more at a time where their rows are multiples of 16.
        assert count(builds, target, kernel, *words, "plain") <= 2, words
