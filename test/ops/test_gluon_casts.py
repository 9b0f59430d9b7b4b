"""Gluon kernels that quantize a matrix, a norm, SwiGLU or its gradients: when they are taken, and their bits.

Without a GPU they run in Triton's interpreter (interpreted_gluon.py).
"""

import itertools
from types import MappingProxyType

import pytest
import torch
from quantize_cases import assert_same

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, CastOptions
from torchao_blockwise.ops.groups.ends import as_groups
from torchao_blockwise.ops.operands import why_no_tiles
from torchao_blockwise.testing import random_tensor

pytest.importorskip("triton")

import triton.language as tl
from interpreted_gluon import interpreted

from torchao_blockwise.ops.device import gluon_tiles
from torchao_blockwise.ops.fused import kernels_gluon as fused
from torchao_blockwise.ops.quantization import kernels_gluon as quantization

EPS = 1e-5
BOTH = CastOptions(FP8_1X128, columnwise=True)
SQUARES = MappingProxyType({"columnwise_format_name": "fp8_128x128"})
KERNELS = {
    "quantize": quantization._quantize_kernel,
    "norm_quantize": fused._norm_quantize_kernel,
    "swiglu_quantize": fused._swiglu_kernel,
    "swiglu_backward_quantize": fused._swiglu_backward_kernel,
}
OPS = tuple(KERNELS)
SWIGLU = OPS[2:]
# Kind of a norm, and dtypes of its weight and bias.
RMS = ("rms", torch.float32, None)
NORMS = (
    RMS, ("rms", None, None), ("rms", torch.bfloat16, None), ("layer", None, None), ("layer", None, torch.float32),
    ("layer", torch.float32, torch.bfloat16),
)  # fmt: skip


def call(op, dh, gate, up, *, columnwise=True, groups=None, dtype=None, norm=RMS, backend="auto", **options):
    """The operation on what it takes of these: `dh` or its norm, with the reference's statistics; gate and up."""
    options = CastOptions(FP8_1X128, columnwise=columnwise, **options)
    if op == "quantize":
        return ops.quantize_by(dh, options, groups if groups is None else as_groups(groups), backend=backend)
    if op == "norm_quantize":
        kind, *dtypes = norm
        statistics = ops.norm_statistics(dh, kind, EPS, backend="reference")
        # Vectors may lie anywhere.
        every = torch.linspace(-1, 1, 2 * dh.shape[1], device=dh.device)
        vectors = (None if of is None else every.to(of)[::2] for of in dtypes)
        return ops.norm_quantize(ops.Norm(dh, *vectors, *statistics, dtype or dh.dtype), options, backend=backend)
    if op == "swiglu_quantize":
        return ops.swiglu_quantize(gate, up, options, groups=groups, backend=backend)
    return ops.swiglu_backward_quantize(dh, gate, up, options, groups=groups, backend=backend)


def inputs_of(rows, width, device="cpu"):
    """dh, gate and up; the latter two are halves of one tensor."""
    dh, *halves = (random_tensor(rows, width, dtype=torch.bfloat16, device=device, seed=seed) / 16 for seed in range(3))
    return dh, *torch.cat(halves, 1).chunk(2, 1)


# --- when they are taken ----------------------------------------------------------------------------------------------


@pytest.fixture
def launched(machine, device):
    """Launches of Gluon kernels."""
    if device == "cpu":
        machine.runs_gluon()
        launch = gluon_tiles.launch
        machine.patch.setattr(tl.block_type, "layout", None, raising=False)
        machine.patch.setattr(
            gluon_tiles, "launch", lambda kernel, *args, **of: launch(interpreted(kernel), *args, **of)
        )
    elif reason := why_no_tiles(BOTH, torch.zeros(16, 16, dtype=torch.bfloat16, device=device)):
        pytest.skip(reason)
    return machine.launches_of(gluon_tiles)


def set_off(x, first, columns=48):
    """`x` in memory that begins `first` elements behind a multiple of 16 bytes, rows `columns + 16` elements apart."""
    wide = x.new_zeros(x.shape[0], columns + 16)
    wide[:, first : first + x.shape[1]] = x
    return wide[:, first : first + x.shape[1]]


def first(change):
    """`change` of dh only."""
    return lambda dh, *others: (change(dh), *others)


def every(change):
    return lambda *tensors: tuple(map(change, tensors))


def cases_of(table) -> list:
    return [
        pytest.param(op, change, options, id=f"{op}-{name}")
        for name, (of, change, options) in table.items()
        for op in of
    ]


# (operations, what is changed of (dh, gate, up), options): the launch that follows is that of the operation.
TAKEN = {
    "a row": (OPS, every(lambda x: x[:1, :16].contiguous()), {}),
    "any number of tokens": (OPS, every(lambda x: x), {}),
    "columnwise only": (OPS, every(lambda x: x), {"rowwise": False}),
    "f16, powers of 2": (OPS, every(lambda x: x.half()), {"power_of_2_scales": True}),
    "square blocks": (OPS, every(lambda x: x), SQUARES),
    "rows apart": (OPS[:2], first(lambda x: set_off(x, 16, columns=64)), {}),
    "a norm to f16": (OPS[1:2], every(lambda x: x), {"dtype": torch.float16}),
    "groups": (("quantize", *SWIGLU), every(lambda x: x), {"groups": (5, 15)}),
    "by name": (OPS[:1], every(lambda x: x), {"backend": "gluon"}),
}


@pytest.mark.parametrize("op, change, options", cases_of(TAKEN))
def test_is_taken(op, change, options, launched, device):
    """By one launch that reads the inputs where they lie."""
    dh, gate, up = change(*inputs_of(33, 48, device=device))
    options = {"padded": True, **options}
    if "groups" in options:
        options["groups"] = torch.tensor(options["groups"], dtype=torch.int32, device=device)
    copies = call(op, dh, gate, up, **options)
    (launch,) = launched
    read = {"swiglu_quantize": (gate, up), "swiglu_backward_quantize": (dh, gate, up)}.get(op, (dh,))
    assert launch.kernel is KERNELS[op]
    assert [t.data_ptr() for t in launch.tensors[: len(read)]] == [t.data_ptr() for t in read]
    assert_same(copies, call(op, dh, gate, up, **options | {"backend": "reference"}))


# (operations, what is changed of (dh, gate, up), options)
NOT_TAKEN = {
    "f32": (OPS, every(lambda x: x.float()), {}),
    "ragged width": (OPS, every(lambda x: x[:, :40].contiguous()), {}),
    "off 16 bytes": (OPS, every(lambda x: set_off(x, 4)), {}),
    "rows off 16 bytes": (OPS, every(lambda x: set_off(x, 0, columns=52)), {}),
    "transposed": (OPS, every(lambda x: x.mT.contiguous().mT), {}),
    "no tokens": (OPS, every(lambda x: x[:0]), {}),
    "no width": (OPS, every(lambda x: x[:, :0]), {}),
    "a gradient in f16": (OPS[3:], first(lambda x: x.half()), {}),
    "a gradient in f32": (OPS[3:], first(lambda x: x.float()), {"rowwise": False}),
    "a norm to f32": (OPS[1:2], every(lambda x: x), {"dtype": torch.float32}),
    "the rowwise copy": (OPS, every(lambda x: x), {"columnwise": False}),
    "another by name": (OPS[:1], every(lambda x: x), {"backend": "triton"}),
}


@pytest.mark.parametrize("op, change, options", cases_of(NOT_TAKEN))
def test_is_not_taken_for_others(op, change, options, launched, device):
    inputs = change(*inputs_of(33, 48, device=device))
    got, expected = call(op, *inputs, **options), call(op, *inputs, **{**options, "backend": "reference"})
    assert KERNELS[op] not in [launch.kernel for launch in launched]
    assert_same(got, expected)


REASONS = {
    "the kernels support only 16-bit dtypes, got torch.float32": (torch.zeros(16, 16),),
    "the kernels take one matrix, got shape [2, 16, 16]": (torch.zeros(2, 16, 16).half(),),
    "got shape [16, 24]": (torch.zeros(16, 24).half(),),
    "the kernels take inputs of one dtype, got torch.float16 and torch.bfloat16": (
        torch.zeros(16, 16).half(), torch.zeros(16, 16).bfloat16(),
    ),
}  # fmt: skip


def test_reasons(machine):
    machine.runs_gluon((9, 0))
    for reason, inputs in REASONS.items():
        assert reason in why_no_tiles(BOTH, *inputs)
    with pytest.raises(
        ValueError, match="gluon cannot run: the kernels always compute the columnwise copy, but it is not requested"
    ):
        call("quantize", *inputs_of(16, 32), columnwise=False, backend="gluon")
    machine.runs_gluon((8, 9))
    assert why_no_tiles(BOTH, torch.zeros(16, 16)) == "the kernels need sm_90 or newer, got cpu"
    machine.runs_gluon((9, 0), interprets=True)
    assert why_no_tiles(BOTH, torch.zeros(16, 16)) == "Triton's interpreter does not support Gluon"


def test_equal_constants_are_one_build():
    """Otherwise a layer's input and its gradient would each have a build."""
    other = BOTH._replace(padded=True, columnwise_format_name=FP8_1X128.name)
    builds = (gluon_tiles.build_of(options, torch.bfloat16, 128, 4) for options in (BOTH, other))
    assert len(set(builds)) == 1


# --- bits -------------------------------------------------------------------------------------------------------------

# (shape, dtype, rowwise). The gradient of SwiGLU has blocks of one half, or of both.
MATRICES = [((1, 16), torch.bfloat16, True), ((147, 128), torch.float16, False), ((147, 144), torch.bfloat16, True)]
if torch.cuda.is_available():
    LARGE = ((1041, 2064), (4097, 1408), (300, 10944))
    MATRICES += itertools.product(LARGE, (torch.bfloat16, torch.float16), (True, False))


def special(rows: int, columns: int, dtype, device) -> torch.Tensor:
    """Values of many sizes; blocks of zeros and of subnormals, -0, Inf, NaN, in separate blocks and in mixed ones."""
    x = random_tensor(rows, columns, dtype=dtype, seed=rows, device=device)
    if rows > 1:
        x[3], x[:, 7] = -0.0, 0.0
        x[4], x[:, 9] = torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).smallest_normal / 8
        x[5, 11], x[21, 10], x[rows - 1, columns - 1] = float("nan"), float("inf"), -float("inf")
        x[6, 12] = torch.finfo(dtype).max
    return x


def special_inputs(*shape: int, dtype, device):
    """Like `inputs_of`; rows are special in each, or in only one of them."""
    dh, gate, up = (special(*shape, dtype, device) / scale for scale in (1, 8, 16))
    return dh, *torch.cat([gate.roll(1, 0), up.roll(2, 0)], 1).chunk(2, 1)


# As one argument: the default tier takes all.
CASES = [(op, matrix, RMS) for op in ("quantize", *SWIGLU) for matrix in MATRICES]
CASES += [("norm_quantize", matrix, norm) for matrix in MATRICES for norm in NORMS]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("guarded")
def test_kernels_have_the_bits_of_the_reference(case, launched, device):
    op, ((M, width), dtype, rowwise), norm = case
    inputs = special_inputs(M, width, dtype=dtype, device=device)
    ends = torch.tensor([0, M // 3, M // 3, M - M // 8], dtype=torch.int32, device=device)
    cases = [
        {"padded": False},
        {"padded": True},
        {"padded": True, "power_of_2_scales": True},
        {"padded": True, **SQUARES},
    ]
    cases += [{"dtype": torch.float16}] if op == "norm_quantize" else [{"groups": ends}, {"groups": ends, **SQUARES}]
    for options in cases:
        got, expected = (
            call(op, *inputs, rowwise=rowwise, norm=norm, **options, backend=backend)
            for backend in ("auto", "reference")
        )
        assert_same(got, expected)
    assert len(launched) == len(cases)
