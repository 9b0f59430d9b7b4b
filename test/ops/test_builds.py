"""Kernels built for the GPUs they are for: no spills, the right instructions, few builds. Needs no GPU.

By default each kernel is built once, for Hopper; all builds of `cast_builds` and `gemm_builds` are slow.
"""

import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import torchao_blockwise

pytest.importorskip("triton")

import cast_builds
import gemm_builds
import kernel_builds

MODULES = {"casts": cast_builds, "gemms": gemm_builds}


def test_each_kernel_builds_for_hopper():
    rows = kernel_builds.built_for(["cast_builds", "gemm_builds"], 90, once=True)
    kernel_builds.assert_sound(rows, 90)
    source = "\n".join(path.read_text() for path in Path(torchao_blockwise.__file__).parent.rglob("*.py"))
    assert Counter(row["kernel"] for row in rows) == Counter(re.findall(r"^def (\w+_kernel)\(", source, re.M))


# --- all builds -------------------------------------------------------------------------------------------------------


@functools.cache
def built(module: str, target: int) -> list[dict]:
    return kernel_builds.built_for([MODULES[module].__name__], target)


def of_targets(*targets: int):
    def mark(test):
        return pytest.mark.slow(pytest.mark.parametrize("target", targets)(test))

    return mark


@of_targets(80, 90, 100)
@pytest.mark.parametrize("module", MODULES)
def test_builds_are_sound(module, target):
    kernel_builds.assert_sound(built(module, target), target)


M_1024 = [f"{m}x1024" for m in (512, 528, 531, 533)]
ROWS, TOKENS = ([f"{m}x512x1024" for m in (4096, 4112, 4099)], [f"512x1024x{m}" for m in (4096, 4112, 4099)])
PLAIN = [*(f"{m}x512x1024" for m in (512, 528, 531)), "528x512x1000", "528x512x1003"]
GLUON = {"m": [f"{m}x512x1024" for m in (1024, 1040, 1043)], "k": [f"512x1024x{m}" for m in (1024, 1040, 1043)]}
GLUON_KINDS = ("square", "one_row", "m", "k", "square_k", "decoded_m", "decoded_k")
# Launches that differ only in their tokens: words of their labels, the tokens, part of the kernel's name, and how many
# builds they share. Two are that of multiples of 16 and that of all others.
SHARED_BUILDS = {
    "casts": [
        ("quantize one_read plain bfloat16 warps8", ("512x1024", "528x2064", "531x1024", "1x1024"), "", 1),
        ("quantize columnwise_read", ("512x1024", "528x2064", "531x1024", "1x1024"), "", 1),
        ("quantize fp8_1x128 columnwise E8 bfloat16", M_1024, "", 1),
        ("quantize nvfp4_1x16 columnwise E8 bfloat16", M_1024, "", 1),
        ("quantize fp8_1x128 rowwise E8 bfloat16", M_1024, "", 2),
        ("quantize nvfp4_1x16 rowwise E8 bfloat16", M_1024, "", 2),
        ("quantize fp8_1x128 rowwise+columnwise plain bfloat16", M_1024, "", 4),
        # Columnwise scales are stored more at a time where their rows are multiples of 16.
        *((f"{name} columnwise plain bfloat16", M_1024, "", 2) for name in ("transformed", "both", "rounded")),
        ("rounded rowwise plain bfloat16", M_1024, "", 2),
        ("amaxes plain", M_1024, "", 2),
        ("norm_quantize triton rms rowwise bfloat16", M_1024, "", 2),
        *(
            (f"{op}_quantize triton rowwise {of} bfloat16", M_1024, "", 2)
            for op in ("swiglu", "swiglu_backward") for of in ("plain", "E8")
        ),
        ("norm_quantize gluon rms rowwise+columnwise bfloat16", ("1x1024", *M_1024), "", 1),
        *(
            (f"{op}_quantize gluon rowwise+columnwise {of} bfloat16", [f"{m}x{k}" for m in (1, 512, 528, 531)], "", 1)
            for op in ("swiglu", "swiglu_backward") for of in ("plain", "E8") for k in (1024, 1040)
        ),
        *((f"{op} bfloat16", [f"{m}x2048" for m in (512, 528, 531, 1)], "", 1) for op in ("backward", "unpermute")),
        *((f"{op} bfloat16", [f"{m}x2048" for m in (512, 528, 531, 1)], "", 1) for op in ("permute", "sum")),
        ("route 256 int64", [str(n) for n in (2**15, 2**15 + 16, 1025)], "", 1),
        # Longer lists.
        *((f"partial_cast nvfp4_16x16 {at} float32 bfloat16", ("x1", "x32"), "", 1) for at in ("aligned", "ragged")),
    ],
    "gemms": [
        *(
            (f"triton {along} {name}·{name}", shapes, "matmul", 1)
            for along, shapes in (("plain", PLAIN), ("m", ROWS), ("k", TOKENS)) for name in ("fp8_1x128", "nvfp4_1x16")
        ),
        *(
            (f"tables {name} E{groups}", ("1", "4096", "4112", "4099"), "", 1)
            for name in ("fp8_1x128", "nvfp4_1x16") for groups in (1, 8, 300)
        ),
        *(
            (f"gluon_{kind} {build}", GLUON.get(kind[-1], ("512x512x1024", "528x512x1024", "531x512x1003")), "", 1)
            for kind in GLUON_KINDS for build in ("256x128", "128x128", "64x64")
        ),
    ],
}  # fmt: skip
# Other options than the tokens. Decoding depends on its operand's size.
_OPTIONS = re.compile("dtype|bias|scaled|power_of_2|groups300|codes|_decode_kernel")


@of_targets(80, 90, 100)
@pytest.mark.parametrize("module", MODULES)
def test_token_counts_make_few_builds(module, target):
    for words, tokens, kernel, most in SHARED_BUILDS[module]:
        if target < 89 and words.startswith(("quantize", "transformed", "both", "rounded", "amaxes", "norm", "swiglu")):
            continue
        if target != 90 and words.startswith("gluon"):
            continue
        builds = {}
        for count in tokens:
            for row in kernel_builds.of(built(module, target), *words.split(), count):
                if kernel in row["kernel"] and not _OPTIONS.search(f"{row['label']} {row['kernel']}"):
                    builds.setdefault(row["kernel"], set()).add(row["build"])
        assert builds and max(map(len, builds.values())) <= most, words


_SIXTEEN_BYTES = {"st.global.v4.b32", "st.global.v2.b64"}
QUANTIZERS = {
    "_quantize_fp8_kernel", "_quantize_nvfp4_kernel", "_quantize_kernel", "_columnwise_kernel", "_rowwise_kernel",
    "_norm_quantize_kernel", "_swiglu_kernel", "_swiglu_backward_kernel",
}  # fmt: skip


@of_targets(90, 100)
def test_payload_is_stored_16_bytes_at_a_time(target):
    """Of any number of tokens. In NVFP4 a block of padded tokens is 8 bytes, and scales are bytes."""
    rows = [row for row in built("casts", target) if row["kernel"] in QUANTIZERS]
    rows = [row for row in rows if re.search("quantize.* (?:512|528|531|533)x1024", row["label"])]
    assert {row["kernel"] for row in rows} == QUANTIZERS - {"_rowwise_kernel"}
    for row in rows:
        label, stores = row["label"], row["instructions"].keys()
        of_blocks = {"st.global.b64"} if "nvfp4" in label and " columnwise" in label else set()
        assert (_SIXTEEN_BYTES | of_blocks) & stores, label
        assert "nvfp4" in label or "st.global.b8" not in stores, label
    for row in kernel_builds.of(built("casts", target), "transpose"):
        if "512x1024" in row["label"]:
            assert _SIXTEEN_BYTES & row["instructions"].keys(), row["label"]


@of_targets(90, 100)
def test_only_scales_are_stored_by_less_than_16_bytes_in_gluon(target):
    """One a thread of each copy: of both gradients, where a program makes both."""
    for op in ("norm_quantize", "swiglu_quantize", "swiglu_backward_quantize"):
        for row in kernel_builds.of(built("casts", target), op, "gluon"):
            scales = 2 if "rowwise+columnwise" in row["label"] else 1
            scales *= 2 if op == "swiglu_backward_quantize" and "x1024" in row["label"] else 1
            stores = {name: n for name, n in row["instructions"].items() if name.startswith("st.")}
            assert stores.keys() == {"st.global.b32", "st.global.v4.b32"}, row["label"]
            assert stores["st.global.b32"] == scales, row["label"]


@of_targets(90, 100)
def test_groups_cost_no_room(target):
    """As many programs of FP8 fit in a multiprocessor with groups as without: registers are given out 8 at a time."""
    for words in ("quantize fp8_1x128 rowwise", "quantize fp8_1x128 columnwise", "swiglu_quantize triton rowwise"):
        words = (*words.split(), "512x1024", "bfloat16")
        plain, grouped = (
            next(row for row in kernel_builds.of(built("casts", target), of, *words) if row["kernel"] in QUANTIZERS)
            for of in ("plain", "E8")
        )
        assert -(-grouped["REG"] // 8) <= -(-plain["REG"] // 8), words


@of_targets(80, 90, 100)
def test_fp8_is_converted_in_hardware_and_shards_move_16_bytes_at_a_time(target):
    for op in ("quantize", "partial_cast", "whole_block_cast") if target >= 89 else ("partial_cast",):
        for row in kernel_builds.of(built("casts", target), op):
            names, label = row["instructions"], row["label"]
            if op != "quantize":
                assert ("st.global.v4.b32" in names) == ("aligned" in label), label
            elif row["kernel"] in QUANTIZERS:
                assert ("cvt.rn.satfinite.e4m3x2.f32" in names) == (not label.startswith("quantize nvfp4")), label


@of_targets(80, 90, 100)
def test_transposes_and_rows_of_tokens_move_16_bytes_at_a_time(target):
    rows = [row for row in built("casts", target) if row["kernel"] == "_transpose_quads_kernel"]
    # In one build a tile.
    assert [row["label"].split()[2:] for row in rows] == [["512x1024"], ["528x1040"], ["512x1024", "large"]]
    assert rows[0]["build"] == rows[1]["build"] != rows[2]["build"]
    for row in [*rows, *(r for r in built("casts", target) if r["kernel"] in ("_scatter_kernel", "_gather_kernel"))]:
        assert "st.global.v4.b32" in row["instructions"] or "x500" in row["label"], row["label"]
    # Counts are on their way before they are summed: three tiles of 16 KiB in shared memory besides that in use.
    rows = [row for n in (64, 256, 512) for row in kernel_builds.of(built("casts", target), "route", "32768", str(n))]
    rows = [row for row in rows if row["kernel"] == "_place_kernel"]
    assert len(rows) == 3 and all(row["SHARED"] >= 3 * 2**14 for row in rows)


_WIDE = {"ld.global.v4.b32", "st.global.v4.b32"}

# --- GEMMs ------------------------------------------------------------------------------------------------------------

TENSOR_CORES = {
    # Decoded to f16.
    80: {"fp8": r"mma\.sync\S*f16\.f16", "nvfp4": r"mma\.sync\S*f16\.f16"},
    90: {"fp8": r"wgmma\.mma_async\S*e4m3\.e4m3", "nvfp4": r"wgmma\.mma_async\S*f16\.f16"},
    100: {"fp8": r"tcgen05\.mma\S*kind::f8f6f4", "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4"},
}


@of_targets(80, 90, 100)
@pytest.mark.parametrize("along", ("plain", "m", "k"))
def test_gemms_run_on_tensor_cores_and_copy_fp8_16_bytes_at_a_time(along, target):
    # Tiles of 16 rows are too low for the wide instructions; those that FP4 tensor cores multiply have 128.
    low = {"plain": (" 16x",), "m": (" 128x", "groups300"), "k": (" 1x",)}[along]
    for row in kernel_builds.of(built("gemms", target), "triton", along):
        element = "fp8" if " fp8_" in row["label"] else "nvfp4"
        is_low = any(word in row["label"] for word in low) and (target, element) != (100, "nvfp4")
        instruction = TENSOR_CORES[80 if is_low else target][element]
        assert any(re.match(instruction, i) for i in row["instructions"]), row["label"]
        if along != "plain" and element == "fp8":
            assert "cp.async.cg" in row["instructions"], row["label"]
            # On Blackwell scales are copied so, too.
            assert target == 100 or "cp.async.ca" not in row["instructions"], row["label"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", GLUON_KINDS)
def test_gluon_runs_on_tensor_cores_and_fits_in_shared_memory(kind):
    element = r"bf16\.bf16" if kind.startswith("decoded") else r"e4m3\.e4m3"
    for row in kernel_builds.of(built("gemms", 90), f"gluon_{kind}"):
        if row["kernel"] != "matmul_kernel":
            continue
        assert any(re.match(rf"wgmma\.mma_async\S*{element}", i) for i in row["instructions"]), row["label"]
        assert row["SHARED"] <= 227 * 1024, row["label"]
        # Triton 3.6 and 3.7 lost the producer's loads of the tile's entry from a `for`: its tiles were all the first,
        # and the kernel hung.
        if kind[-1] in "mk":
            loads = row["loads_in_loops"]
            assert len(loads) >= 2 and min(loads) >= {"m": 4, "k": 2}[kind[-1]], row["label"]


@pytest.mark.slow
def test_scales_for_fp4_tensor_cores_move_16_bytes_at_a_time():
    rows = built("gemms", 100)
    for which in ("nvfp4_1x16", "nvfp4_16x16"):
        aligned, ragged, odd = kernel_builds.of(rows, "blackwell", "swizzle", which)
        assert aligned["build"] == ragged["build"] != odd["build"]
        assert aligned["instructions"].keys() >= _WIDE and "ld.global.b8" not in aligned["instructions"]
        assert "st.global.v4.b32" in odd["instructions"]
    of_groups, zeros = (kernel_builds.of(rows, "blackwell", word)[0] for word in ("groups", "zeros"))
    assert of_groups["instructions"].keys() >= _WIDE and "st.global.v4.b32" in zeros["instructions"]
