"""AUTO's choice for plain and grouped GEMMs: the order on each GPU, what comes next, and when it is made."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import deep_gemm_library
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import Backend, backend, registry
from torchao_blockwise.ops.backend import choose
from torchao_blockwise.ops.gemm import cutlass
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op

PLAIN = sys.modules["torchao_blockwise.ops.gemm.plain"]
GPU = torch.device("cuda:0")
SQUARE, ONE_ROW = (FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128)
NVFP4, NVFP4_ROWS = (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)


@pytest.fixture
def gpu(machine):
    """A machine with a Hopper GPU, to be changed, and no reason why a kernel could not run on it."""
    pytest.importorskip("torchao_blockwise.ops.gemm.kernels_gluon")
    machine.has_gpu_of((9, 0))
    machine.has_cuda("13.0")
    machine.has_triton()
    machine.without_interpreter()
    machine.warns_anew()
    machine.patch.setattr(deep_gemm_library, "why_absent", lambda: "not installed")
    return machine


def choose_by(op, *args, named=Backend.AUTO):
    return choose(op.called, op.table, named, args, op.preferred_backend)


def operands(pair, a_shape, b_shape):
    """Of payloads on a GPU, of these many elements."""
    shapes = (torch.Size(fmt.qdata_shape(*shape)) for fmt, shape in zip(pair, (a_shape, b_shape)))
    payloads = (SimpleNamespace(shape=shape, device=GPU, is_cuda=True, numel=shape.numel) for shape in shapes)
    return [Operand(payload, None, None, fmt.name) for payload, fmt in zip(payloads, pair)]


def choice(m, n, k, pair=SQUARE, out_dtype=torch.bfloat16, adds=False) -> Backend:
    """The backend of a[m, k] · b[n, k]ᵀ on a GPU; adds: of the operation that adds to a sum."""
    a, b = operands(pair, (m, k), (n, k))
    if adds:
        return choose_by(PLAIN.add_matmul_op, SimpleNamespace(is_cuda=True), a, b).backend
    return choose_by(PLAIN.matmul_op, a, b, out_dtype, None).backend


def grouped_choice(along, a_shape, b_shape, pair, named=Backend.AUTO) -> Backend:
    a, b = operands(pair, a_shape, b_shape)
    return choose_by(grouped_matmul_op, a, b, None, along, torch.bfloat16, named=named).backend


# (compute capability, (M, N, K), formats, backend): by tokens on Hopper, and decoded first where there are many rows.
CHOSEN = [
    *(((9, 0), (tokens, 2048, 7168), SQUARE, "gluon") for tokens in (1, 65536)),
    *(((9, 0), (2048, 7168, tokens), ONE_ROW, "gluon") for tokens in (16, 256)),
    *(((9, 0), (2048, 7168, tokens), ONE_ROW, "cublas") for tokens in (257, 65536)),
    *(((major, 0), (rows, 2048, 7168), NVFP4, "triton") for major in (8, 9) for rows in (1, 64)),
    *(((major, 0), (rows, 2048, 7168), NVFP4, "cublas") for major in (8, 9) for rows in (65, 65536)),
    *(((major, 0), (4096, 2048, 7168), NVFP4, "cublas") for major in (10, 12)),
    *(((major, 0), (4096, 2048, 7168), SQUARE, "triton") for major in (8, 10)),
    ((8, 9), (4096, 2048, 7168), ONE_ROW, "triton"),
]
# (compute capability, direction, shapes of a and b, formats, backend): NVFP4 along "m" by tokens an expert, along "k"
# by features.
ROWS, TOKENS = ("m", (2048, 4096), (8, 2048, 4096)), ("k", (2048, 4096), (2048, 4096))
CHOSEN_FOR_GROUPS = [
    ((9, 0), *ROWS, SQUARE, "gluon"),
    *(((9, 0), *TOKENS, pair, "gluon") for pair in (ONE_ROW, SQUARE)),
    *(((9, 0), "m", (tokens, 2048), (128, 1536, 2048), NVFP4, "triton") for tokens in (1, 16384)),
    *(((9, 0), "m", (tokens, 2048), (128, 1536, 2048), NVFP4, "gluon") for tokens in (32768, 2**20)),
    *(((9, 0), "k", (64, tokens), (2048, tokens), NVFP4_ROWS, "triton") for tokens in (64, 65536)),
    *(((9, 0), "k", (768, tokens), (2048, tokens), NVFP4_ROWS, "gluon") for tokens in (64, 65536)),
    *((other, *ROWS, NVFP4, "triton") for other in ((8, 0), (8, 9), (12, 0))),
    *((other, *TOKENS, NVFP4_ROWS, "triton") for other in ((8, 0), (8, 9), (10, 0))),
]


def case_id(value) -> str:
    return value if isinstance(value, str) else "x".join(getattr(part, "name", str(part)) for part in value)


@pytest.mark.parametrize(("capability", "shape", "pair", "chosen"), CHOSEN, ids=case_id)
@pytest.mark.filterwarnings("error")
def test_auto_chooses_in_silence(capability, shape, pair, chosen, gpu):
    gpu.has_gpu_of(capability)
    assert choice(*shape, pair) == chosen


@pytest.mark.parametrize(
    ("capability", "along", "a_shape", "b_shape", "pair", "chosen"), CHOSEN_FOR_GROUPS, ids=case_id
)
@pytest.mark.filterwarnings("error")
def test_auto_chooses_for_groups_in_silence(capability, along, a_shape, b_shape, pair, chosen, gpu):
    gpu.has_gpu_of(capability)
    assert grouped_choice(along, a_shape, b_shape, pair) == chosen


@pytest.mark.parametrize("kernels", (None, "this build has none"))
@pytest.mark.filterwarnings("error")
def test_blackwell_takes_pytorchs_kernels_for_rows_where_they_are_built(kernels, gpu):
    gpu.has_gpu_of((10, 0))
    gpu.patch.setattr(cutlass, "_why_not_built", lambda device: kernels)
    assert grouped_choice(*ROWS, NVFP4) is (Backend.TRITON if kernels else Backend.CUTLASS)


@pytest.mark.filterwarnings("error")
def test_on_hopper_deep_gemm_takes_what_pays(gpu, monkeypatch):
    monkeypatch.setattr(deep_gemm_library, "why_absent", lambda: None)
    monkeypatch.setattr(deep_gemm_library, "product_on", lambda device: print)
    assert choice(16384, 4096, 7168) is Backend.DEEP_GEMM
    assert choice(4096, 4096, 7168) is choice(16384, 4096, 7168, out_dtype=torch.float32) is Backend.GLUON
    monkeypatch.setattr(deep_gemm_library, "product_on", lambda device: "it is broken")
    assert choice(16384, 4096, 7168) is Backend.GLUON


@pytest.mark.parametrize("tokens", (256, 257))
@pytest.mark.parametrize("pair", (SQUARE, ONE_ROW, NVFP4), ids=case_id)
@pytest.mark.parametrize("capability", ((8, 9), (9, 0), (10, 0)), ids=str)
@pytest.mark.filterwarnings("ignore:.*auto uses")
def test_what_adds_to_a_sum_is_chosen_like_a_product_of_float32(capability, pair, tokens, gpu):
    gpu.has_gpu_of(capability)
    for n in (2048, 2040):
        product = choice(2048, n, tokens, pair, torch.float32)
        assert choice(2048, n, tokens, pair, adds=True) is product


def test_what_cannot_run_is_left_for_the_next_with_a_warning(gpu):
    with pytest.warns(UserWarning, match="auto uses gluon instead of cublas: out_dtype must be"):
        assert choice(2048, 7168, 4096, ONE_ROW, torch.float16) is Backend.GLUON
    gpu.patch.setattr(backend, "interpreting", lambda: True)
    with pytest.warns(UserWarning, match="auto uses cublas instead of gluon: Triton's interpreter"):
        assert choice(4096, 2048, 7168) is Backend.CUBLAS
    with pytest.warns(UserWarning, match="auto uses triton instead of gluon: Triton's interpreter"):
        assert choice(4096, 2040, 7168) is Backend.TRITON


@pytest.mark.parametrize(
    ("rows", "formats", "wrong"),
    ((ROWS, (SQUARE, NVFP4), ONE_ROW), (TOKENS, (SQUARE, ONE_ROW, NVFP4_ROWS), SQUARE[::-1])),
    ids="mk",
)
def test_why_not_gluon(rows, formats, wrong, gpu):
    along, a_shape, b_shape = rows
    multiplied, got = (" · ".join(fmt.name for fmt in pair) for pair in (formats[0], wrong))
    empty = [
        (pair, *shapes) for pair in formats for shapes in (((0, 4096), b_shape), (a_shape, (*b_shape[:-2], 0, 4096)))
    ]

    def refused(message, shapes=(a_shape, b_shape), pair=formats[0]):
        with pytest.raises(ValueError, match=f"gluon cannot run: {message}"):
            grouped_choice(along, *shapes, pair, Backend.GLUON)

    refused(f"the kernels support {multiplied} or .*, got {got}", pair=wrong)
    for pair, *shapes in empty:
        payloads = [list(fmt.qdata_shape(*shape)) for fmt, shape in zip(pair, shapes)]
        refused(
            re.escape("TMA does not support empty tensors, got payloads of shape {} and {}".format(*payloads)),
            shapes,
            pair,
        )
    gpu.patch.setattr(backend, "interpreting", lambda: True)
    refused("Triton's interpreter does not support Gluon")
    gpu.without_interpreter()
    gpu.has_triton(False)
    refused("triton is not installed")


@pytest.mark.skipif(not backend.interpreting(), reason="CPU tensors need Triton's interpreter")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_chooses_when_it_runs(monkeypatch):
    pytest.importorskip("torchao_blockwise.ops.gemm.kernels_triton")
    why_not = {"triton": None}
    monkeypatch.setattr(PLAIN, "why_no_kernels", lambda *args: why_not["triton"])
    computed_by = []

    def record(name, *args):
        row = choose(name, *args)
        if name == "matmul":
            computed_by.append(row.backend)
        return row

    monkeypatch.setattr(registry, "choose", record)

    def product():
        x, w = torch.randn(64, 128), torch.randn(256, 128)
        a, b = (ops.quantize(t, fmt, backend="reference").rowwise for t, fmt in zip((x, w), SQUARE))
        return ops.matmul(a, b, out_dtype=torch.float32)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    compiled()
    why_not["triton"] = "it was taken away"
    compiled()
    assert computed_by == ["triton", "reference"]
