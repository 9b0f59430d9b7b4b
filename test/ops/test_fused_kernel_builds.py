"""Kernels that quantize what they compute, built for the GPUs they are for, by kernel_builds.py: no GPU."""

import pytest

pytest.importorskip("triton")

import kernel_builds

pytestmark = pytest.mark.slow

TARGETS = (90, 100)


PLAIN, COLUMNWISE, ROWWISE, BOTH = "plain", "columnwise", "rowwise", "rowwise+columnwise"
SQUARES = "rowwise+columnwise_squares"


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import FP8_1X128, CastOptions, Groups
    from torchao_blockwise.ops.fused import Norm, kernels_triton
    from torchao_blockwise.ops.groups.tables.layout import FIELDS, layout_of

    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

    def label(kernels, of, m, k, dtype, copies, power_of_2):
        backend = kernels.__name__.rpartition("_")[2]
        return f"{backend} {of} {m}x{k} {str(dtype)[6:]} {copies}" + " power_of_2" * power_of_2

    def options_of(copies, power_of_2):
        square = "fp8_128x128" if copies == SQUARES else ""
        rowwise, columnwise = "rowwise" in copies, "columnwise" in copies
        return CastOptions(FP8_1X128, rowwise, columnwise, power_of_2, columnwise_format_name=square)

    def norm(kernels, kind, m, k, copies, dtype=bf16, x_dtype=None, power_of_2=False):
        x, row, vector = (
            torch.zeros(m, k, dtype=x_dtype or dtype),
            torch.zeros(m),
            torch.zeros(k, dtype=x_dtype or dtype),
        )
        if kind == "rms":
            of = Norm(x, vector if kernels is kernels_triton else vector.float(), None, None, row, dtype)
        else:
            of = Norm(x, vector, vector, row, row, dtype)
        named = label(kernels, kind, m, k, dtype, copies, power_of_2) + f" of {x.dtype}" * (x_dtype is not None)
        if copies == PLAIN:
            yield f"norm_statistics {named}", lambda: kernels.norm_statistics(x, kind == "layer", 1e-5)
            yield f"normalize {named}", lambda: kernels.normalize(of)
        else:
            yield f"norm_quantize {named}", lambda: kernels.norm_quantize(of, options_of(copies, power_of_2))

    def swiglu(kernels, m, h, copies, dtype=bf16, experts=None, power_of_2=False):
        dh, (gate, up) = torch.zeros(m, h, dtype=dtype), torch.zeros(m, 2 * h, dtype=dtype).chunk(2, 1)
        named = label(kernels, "ungrouped" if experts is None else f"E{experts}", m, h, dtype, copies, power_of_2)
        groups, options = None, options_of(copies, power_of_2)
        if experts is not None:
            # With their tables, which another kernel makes.
            entries = layout_of(m, experts, FP8_1X128.block[1]).length
            groups = Groups(*(torch.zeros(*size, dtype=torch.int32) for size in ((experts,), (entries, FIELDS))))
        if copies == PLAIN:
            yield f"swiglu {named}", lambda: kernels.swiglu(gate, up)
            yield f"swiglu_backward {named}", lambda: kernels.swiglu_backward(dh, gate, up)
            return
        yield f"swiglu_quantize {named}", lambda: kernels.swiglu_quantize(gate, up, options, groups)
        # Else it runs as two operations.
        if h % 16 == 0:
            yield (
                f"swiglu_backward_quantize {named}",
                lambda: kernels.swiglu_backward_quantize(dh, gate, up, options, groups),
            )

    by = kernels_triton
    for m, k, dtype in ((512, 1024, bf16), (512, 1024, f32), (300, 500, bf16)):
        for copies in (PLAIN, ROWWISE):
            for kind in ("rms", "layer"):
                yield from norm(by, kind, m, k, copies, dtype)
            yield from swiglu(by, m, k, copies, dtype)
    yield from norm(by, "rms", 512, 1024, ROWWISE, power_of_2=True)
    yield from swiglu(by, 512, 1024, ROWWISE, power_of_2=True)
    # Rows on 16 bytes, but blocks of the merged gradient hold parts of both halves.
    yield from swiglu(by, 512, 1040, ROWWISE)
    # Ragged only in M, and with that.
    for k in (1024, 400):
        yield from norm(by, "layer", 300, k, ROWWISE)
        yield from swiglu(by, 300, k, ROWWISE)
    # Token counts that change: the first one is built already, the others make one build more.
    for m in (528, 531, 533):
        yield from norm(by, "rms", m, 1024, ROWWISE)
        yield from swiglu(by, m, 1024, ROWWISE)

    from torchao_blockwise.ops.fused import kernels_gluon as by

    for copies in (COLUMNWISE, BOTH):
        for kind in ("rms", "layer"):
            yield from norm(by, kind, 512, 1024, copies)
    yield from norm(by, "rms", 512, 1024, SQUARES)
    yield from swiglu(by, 512, 1024, SQUARES, experts=8)
    yield from norm(by, "layer", 512, 1024, BOTH, f16, f16)
    yield from norm(by, "layer", 512, 1024, BOTH, bf16, f16)
    yield from norm(by, "rms", 512, 1024, BOTH, power_of_2=True)
    # Of 1040 the blocks of the merged gradient hold parts of both halves.
    for h in (1024, 1040):
        for experts in (None, 8):
            yield from swiglu(by, 512, h, COLUMNWISE, experts=experts)
            # Token counts that change.
            for m in (512, 1, 528, 531, 533):
                yield from swiglu(by, m, h, BOTH, experts=experts)
        yield from swiglu(by, 512, h, BOTH, f16, 8, power_of_2=True)
    yield from swiglu(by, 512, 1024, BOTH, f16)
    for m in (1, 528, 531, 533):
        yield from norm(by, "rms", m, 1024, BOTH)


targets = pytest.mark.parametrize("target", TARGETS)
OPS = ("norm_quantize", "swiglu_quantize", "swiglu_backward_quantize")
ops = pytest.mark.parametrize("op", OPS)


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
