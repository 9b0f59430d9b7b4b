"""Norms and SwiGLU, quantized as they are computed, by Gluon kernels: when they are taken, and their bits on a GPU.

Which tensors they take: test_quantize_gluon.py. Their bits without a GPU: test_compiled_kernels.py.
"""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from grouped_copies import assert_copies_equal

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, CastOptions
from torchao_blockwise.testing import random_tensor, shape_id

pytest.importorskip("triton")

from torchao_blockwise.ops.device import gluon_tiles
from torchao_blockwise.ops.fused import kernels_gluon

EPS = 1e-5
SQUARES = MappingProxyType({"columnwise_format_name": "fp8_128x128"})
OPS = ("norm_quantize", "swiglu_quantize", "swiglu_backward_quantize")
rowwise_too = pytest.mark.parametrize("rowwise", (True, False), ids=("both", "columnwise"))
dtypes = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])


def call(op, dh, gate, up, *, columnwise=True, groups=None, dtype=None, backend="auto", **options):
    """The operation on what it takes of these: a norm on `dh`, with statistics of the reference."""
    options = CastOptions(FP8_1X128, columnwise=columnwise, **options)
    if op == "norm_quantize":
        statistics = ops.norm_statistics(dh, "rms", EPS, backend="reference")
        return ops.norm_quantize(ops.Norm(dh, None, None, *statistics, dtype or dh.dtype), options, backend=backend)
    if op == "swiglu_quantize":
        return ops.swiglu_quantize(gate, up, options, groups=groups, backend=backend)
    return ops.swiglu_backward_quantize(dh, gate, up, options, groups=groups, backend=backend)


def inputs_of(rows, width, dtype=torch.bfloat16, device="cpu"):
    """dh, gate and up; the latter two are halves of one tensor."""
    dh, *halves = (random_tensor(rows, width, dtype=dtype, device=device, seed=seed) / 16 for seed in range(3))
    return dh, *torch.cat(halves, 1).chunk(2, 1)


# --- when they are taken ----------------------------------------------------------------------------------------------


@pytest.fixture
def taken(machine, monkeypatch):
    """Launches of Gluon kernels, of which none happens; every machine will do."""
    # What is quantized alone is not of them.
    monkeypatch.setattr("torchao_blockwise.ops.quantization.operations.why_no_tiles", lambda options, x: "left out")
    machine.runs_gluon()
    return machine.launches_of(gluon_tiles, happen=False)


def built_by(launch) -> tuple:
    """(dtype, power of 2, parts, warps) of a launch, none of which lets two roundings become one."""
    options = launch.options
    assert options["enable_fp_fusion"] is False
    return options["DTYPE"], options["POWER_OF_2"], options["PARTS"], options["num_warps"]


def assert_same_memory(got, expected) -> None:
    assert [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in got] == [
        (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in expected
    ]


def assert_copies_of(copies, rows, width, rowwise) -> None:
    """Of an [rows, width], columnwise padded to so many rows."""
    q, s, qt, st = copies
    assert qt.shape == (width, rows[1]) and st.shape == (-(-rows[1] // FP8_1X128.block[1]), width)
    assert (q is not None) == (s is not None) == rowwise
    if rowwise:
        assert q.shape == (rows[0], width) and s.shape == (-(-width // FP8_1X128.block[1]), rows[0])


@rowwise_too
@dtypes
@pytest.mark.parametrize("power_of_2", (False, True), ids=("any scale", "power of 2"))
@pytest.mark.parametrize("shape", ((1, 16), (33, 48), (130, 272)), ids=shape_id)
def test_swiglu_is_taken(shape, power_of_2, dtype, rowwise, taken, device):
    inputs = inputs_of(*shape, dtype, device)
    (rows, width), padded = shape, -(-shape[0] // 32) * 32
    for op, tensors, columns, build in (
        ("swiglu_quantize", inputs[1:], width, kernels_gluon.FORWARD),
        ("swiglu_backward_quantize", inputs, 2 * width, kernels_gluon.BACKWARD),
    ):
        call(op, *inputs, rowwise=rowwise, power_of_2_scales=power_of_2)
        (launch,) = taken
        *got, q, s, qt, st, blocks = launch.tensors
        assert_same_memory(got, tensors)
        assert_copies_of((q, s, qt, st), (rows, padded), columns, rowwise)
        assert built_by(launch) == (gluon_tiles.DTYPES[dtype], power_of_2, *build) and blocks is None
        taken.clear()


@rowwise_too
def test_swiglu_is_taken_for_tokens_in_groups(rowwise, taken, device):
    inputs = inputs_of(17, 48, device=device)
    ends = torch.tensor([5, 15], dtype=torch.int32, device=device)
    for op, columns in (("swiglu_quantize", 48), ("swiglu_backward_quantize", 96)):
        call(op, *inputs, rowwise=rowwise, groups=ends)
        ((*_, q, s, qt, st, blocks),) = (launch.tensors for launch in taken)
        assert_copies_of((q, s, qt, st), (17, 256), columns, rowwise)
        # The tokens as a whole; each group; those of no group.
        assert blocks.tolist() == [[0, 15, 17, 0], [0, 5, 5, 0], [5, 15, 15, 0], [15, 15, 17, 0]]
        taken.clear()


@rowwise_too
@dtypes
@pytest.mark.parametrize("out", (torch.bfloat16, torch.float16), ids=lambda dtype: f"to_{str(dtype)[6:]}")
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_norm_is_taken(kind, out, dtype, rowwise, taken, device):
    """Vectors of any dtype and strides, x beside something else."""
    x = random_tensor(33, 96, dtype=dtype, device=device)[:, 16:64]
    weight, bias = torch.ones(96, device=device)[::2], torch.ones(48, dtype=torch.bfloat16, device=device)
    statistics = ops.norm_statistics(x, kind, EPS, backend="reference")
    ops.norm_quantize(ops.Norm(x, weight, bias, *statistics, out), CastOptions(FP8_1X128, rowwise, True))
    (launch,) = taken
    got, *vectors, q, s, qt, st = launch.tensors
    assert_same_memory([got], [x])
    dtypes = gluon_tiles.DTYPES
    assert built_by(launch) == (dtypes[out], False, *kernels_gluon.NORM) and launch.options["X_DTYPE"] is dtypes[dtype]
    assert_copies_of((q, s, qt, st), (33, 64), 48, rowwise)
    assert all(t is None or t.is_contiguous() for t in vectors)
    for vector, expected in zip(vectors, (*statistics, weight, bias), strict=True):
        assert (vector is None) == (expected is None) and (vector is None or torch.equal(vector, expected))


def assert_not_taken(taken, op, *inputs, **options) -> None:
    """And the result is right."""
    got, expected = (call(op, *inputs, **options, backend=backend) for backend in ("auto", "reference"))
    assert taken == []
    assert_copies_equal(got, expected)


def beside(x, first, columns=48):
    """`x` in memory that begins `first` elements behind a multiple of 16 bytes, rows so many elements apart."""
    wide = x.new_zeros(x.shape[0], columns + 16)
    wide[:, first : first + x.shape[1]] = x
    return wide[:, first : first + x.shape[1]]


def first(change):
    """`change` of dh only."""
    return lambda dh, *others: (change(dh), *others)


def every(change):
    return lambda *tensors: tuple(map(change, tensors))


# (operations, what is changed of (dh, gate, up), options)
NOT_TAKEN = {
    "f32": (OPS, every(lambda x: x.float()), {}),
    "ragged width": (OPS, every(lambda x: x[:, :40].contiguous()), {}),
    "off 16 bytes": (OPS, every(lambda x: beside(x, 4)), {}),
    "rows off 16 bytes": (OPS, every(lambda x: beside(x, 0, columns=52)), {}),
    "transposed": (OPS, every(lambda x: x.mT.contiguous().mT), {}),
    "no tokens": (OPS, every(lambda x: x[:0]), {}),
    "no width": (OPS, every(lambda x: x[:, :0]), {}),
    "a gradient in f16": (OPS[2:], first(lambda x: x.half()), {}),
    "a gradient in f32": (OPS[2:], first(lambda x: x.float()), {"rowwise": False}),
    "a norm to f32": (OPS[:1], every(lambda x: x), {"dtype": torch.float32}),
    "the rowwise copy": (OPS, every(lambda x: x), {"columnwise": False}),
}
CASES = [(op, change, options) for of, change, options in NOT_TAKEN.values() for op in of]
IDS = [f"{op}-{name}" for name, (of, *_) in NOT_TAKEN.items() for op in of]


@pytest.mark.parametrize("op, change, options", CASES, ids=IDS)
def test_is_not_taken_for_others(op, change, options, taken, device):
    assert_not_taken(taken, op, *change(*inputs_of(33, 48, device=device)), **options)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

gpu_shapes = pytest.mark.parametrize(
    "shape", ((1, 16), (127, 272), (1041, 2064), (4097, 1408), (300, 10944)), ids=shape_id
)


def special_inputs(rows, width, dtype):
    """`inputs_of` with NaN, Inf, -0, zeros, subnormals and the largest number in each."""
    from test_compiled_kernels import special_input

    if rows == 1:
        return inputs_of(rows, width, dtype, "cuda")
    dh, gate, up = (special_input(rows, width, dtype).cuda() / scale for scale in (1, 8, 16))
    # Rows that are special in each, beside rows that are so in one alone.
    gate, up = gate.roll(1, 0), up.roll(2, 0)
    return dh, *torch.cat([gate, up], 1).chunk(2, 1)


@pytest.fixture
def launched(machine):
    """Launches of Gluon kernels, which do happen."""
    reason = gluon_tiles.why_not(torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda"))
    if reason is not None:
        pytest.skip(reason)
    return machine.launches_of(gluon_tiles)


@pytest.mark.gpu
@rowwise_too
@dtypes
@gpu_shapes
@pytest.mark.parametrize("op", OPS[1:])
def test_swiglu_has_the_bits_of_the_reference(op, shape, dtype, rowwise, launched):
    inputs = special_inputs(*shape, dtype)
    M = shape[0]
    ends = torch.tensor([0, M // 3, M // 4, M - M // 8], dtype=torch.int32, device="cuda")
    cases = {"padded": False}, {"padded": True}, {"padded": True, "power_of_2_scales": True}, {"groups": ends}
    cases += SQUARES, {"groups": ends, **SQUARES}
    for options in cases:
        got, expected = (
            call(op, *inputs, rowwise=rowwise, **options, backend=backend) for backend in ("auto", "reference")
        )
        assert_copies_equal(got, expected)
    assert len(launched) == len(cases)


VECTORS = {
    "rms bare": ("rms", None, None),
    "rms weight bf16": ("rms", torch.bfloat16, None),
    "rms weight f32": ("rms", torch.float32, None),
    "layer bare": ("layer", None, None),
    "layer bf16": ("layer", torch.bfloat16, torch.bfloat16),
    "layer weight f32 bias bf16": ("layer", torch.float32, torch.bfloat16),
    "layer bias f32": ("layer", None, torch.float32),
}


@pytest.mark.gpu
@rowwise_too
@pytest.mark.parametrize(("kind", "weight", "bias"), VECTORS.values(), ids=VECTORS)
@dtypes
@gpu_shapes
def test_norms_have_the_bits_of_the_reference(shape, dtype, kind, weight, bias, rowwise, launched):
    x, _, _ = special_inputs(*shape, dtype)
    statistics = ops.norm_statistics(x, kind, EPS, backend="reference")
    weight, bias = (
        None if d is None else random_tensor(1, shape[1], dtype=d, device="cuda", seed=seed)[0] / 16
        for seed, d in enumerate((weight, bias))
    )
    plain, padded = (CastOptions(FP8_1X128, rowwise, True, padded=padded) for padded in (False, True))
    cases = (plain, dtype), (padded, dtype), (padded._replace(power_of_2_scales=True), dtype), (plain, torch.float16)
    cases += ((padded._replace(**SQUARES), dtype),)
    for options, out in cases:
        got, expected = (
            ops.norm_quantize(ops.Norm(x, weight, bias, *statistics, out), options, backend=backend)
            for backend in ("auto", "reference")
        )
        assert_copies_equal(got, expected)
    assert len(launched) == len(cases)
