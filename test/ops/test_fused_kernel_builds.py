"""Kernels that quantize what they compute, built for the GPUs they are for, by kernel_builds.py: no GPU."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (90, 100)


COPIES = {"columnwise": (False, True), "rowwise+columnwise": (True, True)}


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    from torchao_blockwise import _compat

    yield from _triton_cases()
    if _compat.has_gluon():
        yield from _gluon_cases()


def _triton_cases():
    import torch

    from torchao_blockwise.formats import FP8_1X128, CastOptions
    from torchao_blockwise.ops.fused import Norm
    from torchao_blockwise.ops.fused import kernels_triton as fused

    def tensors(m, k, dtype, rowwise, columnwise, power_of_2):
        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise) or "plain"
        label = f"triton {m}x{k} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2
        return label, torch.zeros(m, k, dtype=dtype), torch.zeros(m), torch.zeros(k, dtype=dtype)

    def statistics_case(kind, m, k, dtype):
        x = torch.zeros(m, k, dtype=dtype)
        label = f"norm_statistics {kind} {m}x{k} {str(dtype)[6:]}"
        return label, lambda: fused.norm_statistics(x, kind == "layer", 1e-5)

    def norm_case(kind, m, k, dtype, *copies, power_of_2=False):
        label, x, rstd, weight = tensors(m, k, dtype, *copies, power_of_2)
        bias, mean = (None, None) if kind == "rms" else (weight, rstd)
        of = Norm(x, weight, bias, mean, rstd, dtype)
        if not any(copies):
            return f"normalize {kind} {label}", lambda: fused.normalize(of)
        return (
            f"norm_quantize {kind} {label}",
            lambda: fused.norm_quantize(of, CastOptions(FP8_1X128, *copies, power_of_2)),
        )

    def swiglu_case(m, k, dtype, *copies, power_of_2=False):
        label, x, _, _ = tensors(m, k, dtype, *copies, power_of_2)
        gate, up = torch.zeros(m, 2 * k, dtype=dtype).chunk(2, 1)
        if not any(copies):
            yield f"swiglu {label}", lambda: fused.swiglu(gate, up)
            yield f"swiglu_backward {label}", lambda: fused.swiglu_backward(x, gate, up)
            return
        options = CastOptions(FP8_1X128, *copies, power_of_2)
        yield f"swiglu_quantize {label}", lambda: fused.swiglu_quantize(gate, up, options, None)
        if k % 16:
            # Runs as two operations.
            return
        yield f"swiglu_backward_quantize {label}", lambda: fused.swiglu_backward_quantize(x, gate, up, options, None)

    bf16, f32 = torch.bfloat16, torch.float32
    for m, k, dtype in ((512, 1024, bf16), (512, 1024, f32), (300, 500, bf16)):
        for kind in ("rms", "layer"):
            yield statistics_case(kind, m, k, dtype)
        for copies in ((False, False), (True, False)):
            for kind in ("rms", "layer"):
                yield norm_case(kind, m, k, dtype, *copies)
            yield from swiglu_case(m, k, dtype, *copies)
    yield norm_case("rms", 512, 1024, bf16, True, False, power_of_2=True)
    yield from swiglu_case(512, 1024, bf16, True, False, power_of_2=True)
    # Rows on 16 bytes, but blocks of the merged gradient hold parts of both halves.
    yield from swiglu_case(512, 1040, bf16, True, False)
    # Ragged in M alone, and with that.
    for k in (1024, 400):
        yield norm_case("layer", 300, k, bf16, True, False)
        yield from swiglu_case(300, k, bf16, True, False)
    # Token counts that change: the first one is built already, the others make one build more.
    for m in (528, 531, 533):
        yield norm_case("rms", m, 1024, bf16, True, False)
        yield from swiglu_case(m, 1024, bf16, True, False)


def _gluon_cases():
    import torch

    from torchao_blockwise.formats import FP8_1X128, CastOptions, Groups
    from torchao_blockwise.ops.fused import Norm
    from torchao_blockwise.ops.fused import kernels_gluon as fused
    from torchao_blockwise.ops.groups.tables.layout import FIELDS, layout_of

    bf16, f16 = torch.bfloat16, torch.float16

    def norm_case(kind, m, k, copies, x_dtype=bf16, dtype=bf16, power_of_2=False):
        label = f"norm_quantize gluon {kind} {m}x{k} {str(dtype)[6:]} {copies}"
        label += f" of {str(x_dtype)[6:]}" * (x_dtype != dtype) + " power_of_2" * power_of_2
        x, row, weight, bias = torch.zeros(m, k, dtype=x_dtype), torch.zeros(m), torch.zeros(k), torch.zeros(k)
        of = Norm(x, weight, None, None, row, dtype)
        if kind == "layer":
            of = Norm(x, weight.to(x_dtype), bias.to(x_dtype), row, row, dtype)
        options = CastOptions(FP8_1X128, *COPIES[copies], power_of_2)
        return label, lambda: fused.norm_quantize(of, options)

    def swiglu_cases(m, h, copies, experts=None, dtype=bf16, power_of_2=False):
        of = "ungrouped" if experts is None else f"E{experts}"
        label = f"gluon {of} {m}x{h} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2
        dh, (gate, up) = torch.zeros(m, h, dtype=dtype), torch.zeros(m, 2 * h, dtype=dtype).chunk(2, 1)
        groups, options = None, CastOptions(FP8_1X128, *COPIES[copies], power_of_2)
        if experts is not None:
            # With their tables, which another kernel makes.
            entries = layout_of(m, experts, FP8_1X128.block[1]).length
            ends, tables = (torch.zeros(*shape, dtype=torch.int32) for shape in ((experts,), (entries, FIELDS)))
            groups = Groups(ends, tables)
        yield f"swiglu_quantize {label}", lambda: fused.swiglu_quantize(gate, up, options, groups)
        yield (
            f"swiglu_backward_quantize {label}",
            lambda: fused.swiglu_backward_quantize(dh, gate, up, options, groups),
        )

    for copies in COPIES:
        for kind in ("rms", "layer"):
            yield norm_case(kind, 512, 1024, copies)
        # Of 1040 the blocks of the merged gradient hold parts of both halves.
        for h in (1024, 1040):
            for groups in (None, 8):
                yield from swiglu_cases(512, h, copies, groups)
    both = "rowwise+columnwise"
    yield norm_case("layer", 512, 1024, both, f16, f16)
    yield norm_case("layer", 512, 1024, both, f16, bf16)
    yield norm_case("rms", 512, 1024, both, power_of_2=True)
    for h in (1024, 1040):
        yield from swiglu_cases(512, h, both, 8, f16, power_of_2=True)
    yield from swiglu_cases(512, 1024, both, None, f16)
    # Token counts that change.
    for m in (1, 528, 531, 533):
        yield norm_case("rms", m, 1024, both)
        for h in (1024, 1040):
            for groups in (None, 8):
                yield from swiglu_cases(m, h, both, groups)


@pytest.fixture(scope="module")
def builds():
    return kernel_builds.built_for([Path(__file__).stem], TARGETS)


targets = pytest.mark.parametrize("target", TARGETS)
OPS = ("norm_quantize", "swiglu_quantize", "swiglu_backward_quantize")
ops = pytest.mark.parametrize("op", OPS)


@functools.cache
def _has_gluon() -> bool:
    from torchao_blockwise import _compat

    return _compat.has_gluon()


needs_gluon = pytest.mark.skipif(not _has_gluon(), reason="needs Gluon of Triton 3.6 or newer")


def rows_of(builds, target, *ops):
    return [row for op in ops for row in kernel_builds.of(builds[target], op)]


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
def test_payload_is_stored_16_bytes_at_a_time(builds, target):
    """Whatever the number of tokens is."""
    for row in rows_of(builds, target, *OPS):
        words = row["label"].split()
        if "triton" in words and ("512x1024" in words or "531x1024" in words):
            assert "st.global.v4.b32" in row["instructions"], row["label"]
            assert "st.global.b8" not in row["instructions"], row["label"]


@needs_gluon
@targets
@ops
def test_only_scales_are_stored_by_less_than_16_bytes_in_gluon(builds, target, op):
    """One a thread of each copy: of both gradients, where a program makes both."""
    for row in kernel_builds.of(builds[target], op, "gluon"):
        scales = 2 if "rowwise+columnwise" in row["label"] else 1
        if op == "swiglu_backward_quantize" and "x1024" in row["label"]:
            scales *= 2
        stores = {name: n for name, n in row["instructions"].items() if name.startswith("st.")}
        assert stores.keys() == {"st.global.b32", "st.global.v4.b32"}, row["label"]
        assert stores["st.global.b32"] == scales, row["label"]


@targets
@ops
def test_token_counts_make_two_builds(builds, target, op):
    shapes = ("512x1024", "528x1024", "531x1024", "533x1024")
    words = (op, "triton", "bfloat16", "rowwise")
    rows = [kernel_builds.of(builds[target], *words, shape)[0] for shape in shapes]
    assert len({row["build"] for row in rows}) == 2


@needs_gluon
@targets
@ops
def test_token_counts_make_one_build_in_gluon(builds, target, op):
    """A build each for tokens in groups, and for gradients whose blocks hold parts of both."""
    tokens, kinds = (1, 512, 528, 531, 533), {}
    for of in ("rms",) if op == "norm_quantize" else ("ungrouped", "E8"):
        for width in (1024,) if op == "norm_quantize" else (1024, 1040):
            words = (op, "gluon", of, "bfloat16", "rowwise+columnwise")
            rows = [kernel_builds.of(builds[target], *words, f"{m}x{width}") for m in tokens]
            rows = [row for found in rows for row in found if "power_of_2" not in row["label"]]
            assert len(rows) == len(tokens)
            kinds[of, width] = {row["build"] for row in rows}
    assert all(len(found) == 1 for found in kinds.values())
    assert (
        len(set.union(*kinds.values())) == {"norm_quantize": 1, "swiglu_quantize": 2, "swiglu_backward_quantize": 4}[op]
    )
