"""Kernels that quantise what they compute, built for the GPUs they are for, as test_kernel_builds.py does: no GPU."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.append(str(Path(__file__).parent))
import test_kernel_builds as kernel_builds

TARGETS = (90, 100)
# Sums and products too: without ".rn" ptxas may contract two of them.
_INSTRUCTIONS = re.compile(kernel_builds._INSTRUCTIONS.pattern + r"|(?:add|sub|mul)\.(?:[\w.]+\.)?f32")


def _cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import FP8_1X128
    from torchao_blockwise.ops.fused import new_copies
    from torchao_blockwise.ops.norm_quantize import triton as norm
    from torchao_blockwise.ops.swiglu_quantize import triton as swiglu

    def tensors(m, k, dtype, rowwise, columnwise, power_of_2):
        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise) or "plain"
        label = f"{m}x{k} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2
        return label, torch.zeros(m, k, dtype=dtype), torch.zeros(m), torch.zeros(k, dtype=dtype)

    def new(x, width, *copies):
        return new_copies(x, FP8_1X128, (x.shape[0], width), *copies), *copies

    def statistics_case(kind, m, k, dtype):
        x = torch.zeros(m, k, dtype=dtype)
        label = f"norm_statistics {kind} {m}x{k} {str(dtype)[6:]}"
        return label, lambda: norm.statistics(x, kind == "layer", 1e-5)

    def norm_case(kind, m, k, dtype, *copies, power_of_2=False):
        label, x, rstd, weight = tensors(m, k, dtype, *copies, power_of_2)
        arguments = (x, None, rstd, weight, None) if kind == "rms" else (x, rstd, rstd, weight, weight)
        if not any(copies):
            return f"normalize {kind} {label}", lambda: norm.normalize(*arguments, dtype)
        made = new(x, k, *copies)
        return (
            f"norm_quantize {kind} {label}",
            lambda: norm.norm_quantize(*arguments, dtype, FP8_1X128, *made, power_of_2),
        )

    def swiglu_case(m, k, dtype, *copies, power_of_2=False):
        label, x, _, _ = tensors(m, k, dtype, *copies, power_of_2)
        gate, up = torch.zeros(m, 2 * k, dtype=dtype).chunk(2, 1)
        if not any(copies):
            yield f"swiglu {label}", lambda: swiglu.swiglu(gate, up)
            yield f"swiglu_backward {label}", lambda: swiglu.swiglu_backward(x, gate, up)
            return
        forward, backward = new(x, k, *copies), new(x, 2 * k, *copies)
        yield (
            f"swiglu_quantize {label}",
            lambda: swiglu.swiglu_quantize(gate, up, FP8_1X128, *forward, power_of_2),
        )
        if k % 16:
            # Runs as two operations.
            return
        yield (
            f"swiglu_backward_quantize {label}",
            lambda: swiglu.swiglu_backward_quantize(x, gate, up, FP8_1X128, *backward, power_of_2),
        )

    bf16, f32 = torch.bfloat16, torch.float32
    for m, k, dtype in ((512, 1024, bf16), (512, 1024, f32), (300, 500, bf16)):
        for kind in ("rms", "layer"):
            yield statistics_case(kind, m, k, dtype)
        for copies in ((False, False), (True, False), (False, True), (True, True)):
            for kind in ("rms", "layer"):
                yield norm_case(kind, m, k, dtype, *copies)
            yield from swiglu_case(m, k, dtype, *copies)
    yield norm_case("rms", 512, 1024, bf16, True, True, power_of_2=True)
    yield from swiglu_case(512, 1024, bf16, True, True, power_of_2=True)
    # Rows on 16 bytes, but blocks of the merged gradient hold parts of both halves.
    yield from swiglu_case(512, 1040, bf16, True, True)
    yield from swiglu_case(512, 1040, bf16, False, True)
    # Ragged in M alone, and with that.
    for k in (1024, 400):
        yield norm_case("layer", 300, k, bf16, True, True)
        yield from swiglu_case(300, k, bf16, True, True)
    # Token counts that change: the first one is built already, the others make one build more.
    for m in (528, 531, 533):
        yield norm_case("rms", m, 1024, bf16, True, True)
        yield from swiglu_case(m, 1024, bf16, True, True)
    yield norm_case("rms", 531, 1024, bf16, False, True)
    yield from swiglu_case(531, 1024, bf16, False, True)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for(__file__, TARGETS)


targets = pytest.mark.parametrize("target", TARGETS)
OPS = ("norm_quantize", "swiglu_quantize", "swiglu_backward_quantize")


def rows_of(builds, target, *ops):
    return [row for op in ops for row in kernel_builds._of(builds[target], op)]


@targets
def test_nothing_spills(builds, target):
    assert [(row["label"], row["STACK"]) for row in builds[target] if row["STACK"] + row["LOCAL"]] == []


@targets
def test_each_step_is_rounded_by_itself(builds, target):
    """No contraction, by the compiler or by ptxas; division rounded correctly; subnormals kept."""
    for row in rows_of(builds, target, *OPS, "normalize", "swiglu", "swiglu_backward"):
        names = row["instructions"]
        assert not [i for i in names if ".ftz" in i or i.startswith("fma")], row["label"]
        arithmetic = [i for i in names if re.match(r"(add|sub|mul|div)\.", i)]
        assert arithmetic and all(".rn." in i for i in arithmetic), (row["label"], arithmetic)
        assert ("cvt.rn.satfinite.e4m3x2.f32" in names) == ("plain" not in row["label"]), row["label"]


@targets
def test_no_half_of_a_word_is_undefined(builds, target):
    for row in rows_of(builds, target, *OPS):
        assert row["half_defined_words"] == [], row["label"]


@targets
def test_payload_is_stored_16_bytes_at_a_time(builds, target):
    """Whatever the number of tokens is."""
    for row in rows_of(builds, target, *OPS):
        if any(shape in row["label"].split() for shape in ("512x1024", "531x1024")):
            assert "st.global.v4.b32" in row["instructions"], row["label"]
            assert "st.global.b8" not in row["instructions"], row["label"]


@targets
@pytest.mark.parametrize("op", OPS)
def test_token_counts_make_two_builds(builds, target, op):
    shapes = ("512x1024", "528x1024", "531x1024", "533x1024")
    rows = [kernel_builds._of(builds[target], op, shape, "bfloat16", "rowwise+columnwise")[0] for shape in shapes]
    assert len({row["build"] for row in rows}) == 2


if __name__ == "__main__":
    kernel_builds._cases, kernel_builds._INSTRUCTIONS = _cases, _INSTRUCTIONS
    kernel_builds._main(int(sys.argv[1]))
