"""Kernels of GEMMs and tables of groups, built for the GPUs they are for, by kernel_builds.py: no GPU."""

import itertools
import re

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (80, 90, 100)
# Of these all instructions are counted, as the GPU has them.
DISASSEMBLED = "blackwell"


def _launch(module, pair, along, m, n, k, groups=8, dtype="bfloat16", bias=False, scaled=False, **build):
    """A launcher's call for a [m, k] · b [n, k]ᵀ; along "m" m, along "k" k counts tokens. dtype "adding": to a sum."""
    import torch

    from torchao_blockwise.formats import Groups
    from torchao_blockwise.ops.groups.ends import padded_tokens

    ends = Groups(torch.zeros(groups, dtype=torch.int32))
    if along == "k":
        k = padded_tokens(k, groups, pair[0].block[1])
    a = kernel_builds.operand(pair[0], m, k)
    b = kernel_builds.operand(pair[1], *((groups, n, k) if along == "m" else (n, k)))
    if scaled:
        a, b = (x._replace(global_scale=torch.ones(groups)) for x in (a, b))
    if dtype == "adding":
        out = torch.zeros(*((groups,) if along else ()), m, n)
        return lambda: module.add_matmul(out, a, b, ends if along else None, **build)
    dtype = getattr(torch, dtype)
    if along:
        return lambda: module.grouped_matmul(a, b, ends, along, dtype, **build)
    return lambda: module.matmul(a, b, dtype, torch.zeros(n) if bias else None, **build)


def _label(*words, **options) -> str:
    return " ".join([*map(str, words), *(f"{k}{v}" for k, v in options.items() if v)])


# The builds of each kind: (M, N, K), groups, dtype, and other options. Of token counts that change, one build.
PLAIN = [((m, 512, 1024), {}) for m in (16, 64, 512, 528, 531)] + [((528, 512, k), {}) for k in (1000, 1003)]
PLAIN += [((300, 500, 500), {}), ((512, 512, 1024), {"dtype": "float32", "bias": True})]
ALONG_M = [((m, 512, 1024), {}) for m in (128, 512, 4096, 4112, 4099)]
ALONG_M += [((4096, 512, 1024), {"dtype": "float32"}), ((4096, 500, 500), {}), ((4096, 512, 1024), {"groups": 300})]
ALONG_K = [((512, 1024, tokens), {}) for tokens in (1, 4096, 4112, 4099)]
ALONG_K += [((512, 1024, 4096), {"dtype": dtype}) for dtype in ("float32", "adding")]
# Sizes of 1 become constants.
ALONG_K += [((500, 500, 4096), {"groups": 300}), ((500, 1, 4096), {"groups": 1}), ((1, 500, 4096), {"groups": 1})]
SCALED_M = [((m, 512, 1024), {"scaled": True}) for m in (128, 512, 4096)]
SCALED_K = [((512, 1024, 4096), {"scaled": True, "dtype": dtype}) for dtype in ("bfloat16", "adding")]


def _triton_cases(target: int):
    from torchao_blockwise.formats import FORMATS, NVFP4_16X16
    from torchao_blockwise.ops.gemm import KERNEL_PAIRS, kernels_triton

    kernels_triton.compute_capability = lambda device: divmod(target, 10)
    for names in sorted(KERNEL_PAIRS):
        pair = [FORMATS[name] for name in names]
        kinds = {"": PLAIN, "m": ALONG_M + SCALED_M * pair[0].has_global_scale}
        if pair[1].block[0] > 1:
            kinds["m"] = [*kinds["m"], ((4096, 1, 500), {"groups": 1})]
        if pair[1] is not NVFP4_16X16:
            kinds["k"] = ALONG_K + SCALED_K * pair[0].has_global_scale
        for along, rows in kinds.items():
            for sizes, options in rows:
                label = _label("triton", along or "plain", "·".join(names), "x".join(map(str, sizes)), **options)
                yield label, _launch(kernels_triton, pair, along, *sizes, **options)


def _gluon_cases():
    from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.gemm import kernels_gluon
    from torchao_blockwise.ops.gemm.builds import BUILDS

    kernels_gluon.multiprocessors = lambda device: 132
    plain = [((512, 512, 1024), {}), ((528, 512, 1024), {}), ((531, 512, 1003), {}), ((512, 509, 1024), {})]
    plain += [((512, 512, 1024), option) for option in ({"dtype": "float32"}, {"bias": True}, {"dtype": "adding"})]
    rows = [((m, 512, 1024), {"groups": 4}) for m in (1024, 1040, 1043)]
    rows += [((1024, 512, 1024), {"groups": 4, "dtype": "float32"}), ((1024, 509, 1003), {"groups": 4})]
    # The same shapes of an expert's gradient, of as many tokens.
    tokens = [((n, k, m), options) for (m, n, k), options in rows]
    tokens += [((512, 1024, 1024), {"groups": 4, "dtype": "adding"})]
    scaled = {"groups": 4, "scaled": True}
    kinds = {
        "square": ("", (FP8_1X128, FP8_128X128), plain),
        "one_row": ("", (FP8_1X128, FP8_1X128), plain),
        "m": ("m", (FP8_1X128, FP8_128X128), rows),
        "k": ("k", (FP8_1X128, FP8_1X128), tokens),
        "square_k": ("k", (FP8_1X128, FP8_128X128), tokens),
        "decoded_m": ("m", (NVFP4_1X16, NVFP4_16X16), [*rows, ((1024, 512, 1024), scaled)]),
        "decoded_k": ("k", (NVFP4_1X16, NVFP4_1X16), [*tokens, ((512, 1024, 1024), scaled)]),
    }
    kinds["decoded_k"][2].append(((512, 1024, 1024), scaled | {"dtype": "adding"}))
    for build, (kind, (along, pair, shapes)) in itertools.product(BUILDS, kinds.items()):
        for sizes, options in shapes:
            label = _label(f"gluon_{kind}", f"{build.tile_m}x{build.tile_n}", "x".join(map(str, sizes)), **options)
            yield label, _launch(kernels_gluon, pair, along, *sizes, **options, build=build)


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.gemm import kernels_blackwell, kernels_triton
    from torchao_blockwise.ops.groups.tables.kernels_triton import group_tables

    for fmt, groups, m in itertools.product((FP8_1X128, NVFP4_1X16), (1, 8, 300), (1, 4096, 4112, 4099)):
        ends = torch.zeros(groups, dtype=torch.int32)
        yield f"tables {fmt.name} {m} E{groups}", lambda ends=ends, m=m, fmt=fmt: group_tables(ends, m, fmt)
    yield from _triton_cases(target)
    if target == 90:
        yield from _gluon_cases()
    square, rows = (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)
    for pair, along, m in ((square, "", 16), (square, "", 512), (square, "m", 512), (rows, "k", 512)):
        yield f"blackwell gemm {along or m}", _launch(kernels_triton, pair, along, m, 512, 1024)
    for fmt, (m, k) in itertools.product(square, ((512, 1024), (531, 1024), (512, 1000))):
        x = kernel_builds.operand(fmt, m, k)
        yield f"blackwell swizzle {fmt.name} {m}x{k}", lambda x=x: kernels_blackwell.swizzled_scales(x)
    x, out, ends = kernel_builds.operand(NVFP4_1X16, 512, 1024), torch.zeros(512, 1024).bfloat16(), torch.zeros(8).int()
    yield "blackwell swizzle groups", lambda: kernels_blackwell.swizzled_scales_of_groups(x, ends)
    yield "blackwell zeros", lambda: kernels_blackwell.zero_tail_(out, ends)


targets = pytest.mark.parametrize("target", TARGETS)
GLUON_KINDS = ("square", "one_row", "m", "k", "square_k", "decoded_m", "decoded_k")
gluon_kinds = pytest.mark.parametrize("kind", GLUON_KINDS)


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


TENSOR_CORES = {
    # Decoded to f16.
    80: {"fp8": r"mma\.sync\S*f16\.f16", "nvfp4": r"mma\.sync\S*f16\.f16"},
    90: {"fp8": r"wgmma\.mma_async\S*e4m3\.e4m3", "nvfp4": r"wgmma\.mma_async\S*f16\.f16"},
    100: {"fp8": r"tcgen05\.mma\S*kind::f8f6f4", "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4"},
}


@targets
@pytest.mark.parametrize("along", ("plain", "m", "k"))
@pytest.mark.parametrize("element", ("fp8", "nvfp4"))
def test_gemms_run_on_tensor_cores(builds, target, along, element):
    # Tiles of 16 rows are too low for the wide instructions; those that FP4 tensor cores multiply have 128.
    low = {"plain": (" 16x",), "m": (" 128x", "groups300"), "k": (" 1x",)}[along]
    for row in kernel_builds.of(builds[target], "triton", along):
        if f" {element}_" in row["label"]:
            is_low = any(word in row["label"] for word in low) and (target, element) != (100, "nvfp4")
            instruction = TENSOR_CORES[80 if is_low else target][element]
            assert any(re.match(instruction, i) for i in row["instructions"]), row["label"]


@targets
@pytest.mark.parametrize("along", ("m", "k"))
def test_fp8_payload_is_copied_16_bytes_at_a_time(builds, target, along):
    for row in kernel_builds.of(builds[target], "triton", along):
        if " fp8" in row["label"]:
            assert "cp.async.cg" in row["instructions"], row["label"]
            # On Blackwell scales are copied so, too.
            assert target == 100 or "cp.async.ca" not in row["instructions"], row["label"]


# Shapes that differ in token counts, by where tokens are counted.
SAME_BUILD = {
    "plain": [*(f"{m}x512x1024" for m in (512, 528, 531)), "528x512x1000", "528x512x1003"],
    "m": [f"{m}x512x1024" for m in (4096, 4112, 4099)],
    "k": [f"512x1024x{m}" for m in (4096, 4112, 4099)],
}


@targets
@pytest.mark.parametrize("name", ("fp8_1x128", "nvfp4_1x16"))
def test_token_counts_do_not_recompile(builds, target, name):
    for along, shapes in SAME_BUILD.items():
        rows = [kernel_builds.of(builds[target], "triton", along, f"{name}·{name}", shape)[0] for shape in shapes]
        assert len({row["build"] for row in rows}) == 1, along
    for groups in (1, 8, 300):
        rows = kernel_builds.of(builds[target], "tables", name, f"E{groups}")
        assert len(rows) == 4 and len({row["build"] for row in rows}) == 1, groups


# --- Gluon ------------------------------------------------------------------------------------------------------------


def by_gluon(builds, kind, *words):
    rows = kernel_builds.of(builds[90], f"gluon_{kind}", *words)
    return [row for row in rows if row["kernel"] == "matmul_kernel"]


@gluon_kinds
def test_gluon_runs_on_tensor_cores_and_fits_in_shared_memory(builds, kind):
    element = r"bf16\.bf16" if kind.startswith("decoded") else r"e4m3\.e4m3"
    for row in by_gluon(builds, kind):
        assert any(re.match(rf"wgmma\.mma_async\S*{element}", i) for i in row["instructions"]), row["label"]
        assert row["SHARED"] <= 227 * 1024, row["label"]


@pytest.mark.parametrize("kind", GLUON_KINDS[2:])
def test_each_partition_loads_the_entry_of_each_tile(builds, kind):
    """Triton 3.6 and 3.7 lost the producer's loads from a `for`: its tiles were all the first, and the kernel hung."""
    for row in by_gluon(builds, kind):
        loads = row["loads_in_loops"]
        assert len(loads) >= 2 and min(loads) >= {"m": 4, "k": 2}[kind[-1]], row["label"]


@gluon_kinds
def test_token_counts_do_not_rebuild_gluon(builds, kind):
    is_plain = kind in ("square", "one_row")
    if is_plain:
        shapes = ["512x512x1024", "528x512x1024", "531x512x1003"]
    else:
        shapes = [f"{m}x512x1024" if kind[-1] == "m" else f"512x1024x{m}" for m in (1024, 1040, 1043)]
    for tile in {row["label"].split()[1] for row in by_gluon(builds, kind)}:
        rows = [row for shape in shapes for row in kernel_builds.of(builds[90], f"gluon_{kind}", tile, shape)]
        rows = [row for row in rows if not re.search("dtype|bias|scaled", row["label"])]
        # With groups the schedule is another kernel.
        kernels = {row["kernel"] for row in rows} - {"_decode_kernel"}
        assert len({row["build"] for row in rows if row["kernel"] in kernels}) == len(kernels) == 2 - is_plain


# --- NVFP4 on Blackwell -----------------------------------------------------------------------------------------------


def test_gemms_are_fp4_instructions_and_scales_move_16_bytes_at_a_time(builds):
    """UTCOMMA multiplies e2m1 with block scales; UTCQMMA would be 8 bits, UTCHMMA 16."""
    rows = builds[100]
    for which in ("16", "512", "m", "k"):
        (row,) = kernel_builds.of(rows, "blackwell", "gemm", which)
        assert {name.split(".")[0] for name in row["sass"] if "MMA" in name} == {"UTCOMMA"}
    for which in ("nvfp4_1x16", "nvfp4_16x16"):
        aligned, ragged, odd = kernel_builds.of(rows, "blackwell", "swizzle", which)
        assert aligned["build"] == ragged["build"] != odd["build"]
        assert {"LDG.E.128", "STG.E.128"} <= aligned["sass"].keys() and "LDG.E.U8" not in aligned["sass"]
        assert "STG.E.128" in odd["sass"]
    of_groups, zeros = (kernel_builds.of(rows, "blackwell", word)[0] for word in ("groups", "zeros"))
    assert {"LDG.E.128", "STG.E.128"} <= of_groups["sass"].keys()
    assert "STG.E.128" in zeros["sass"]
