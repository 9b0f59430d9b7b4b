"""AUTO's choice for a plain product: the order on a Hopper GPU, what comes next, and when it is made."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import deep_gemm_library
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import Backend, backend, registry
from torchao_blockwise.ops.backend import Implementation, choose

MATMUL = sys.modules["torchao_blockwise.ops.gemm.plain"]
GPU = torch.device("cuda:0")
SQUARE, ONE_ROW, NVFP4 = (FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16)


@pytest.fixture
def gpu(machine):
    """A machine with a Hopper GPU, to be changed, and no reason why a kernel could not run on it."""
    pytest.importorskip("torchao_blockwise.ops.gemm.plain.kernels_gluon")
    machine.has_gpu_of((9, 0))
    machine.has_cuda("13.0")
    machine.has_triton()
    machine.has_gluon()
    machine.without_interpreter()
    machine.warns_anew()
    machine.patch.setattr(deep_gemm_library, "why_absent", lambda: "not installed")
    return machine


def choice(m, n, k, pair=SQUARE, out_dtype=torch.bfloat16, adds=False):
    """The backend of a[m, k] · b[n, k]ᵀ on a GPU, as the operation chooses it; adds: of the one that adds to a sum."""
    shapes = (fmt.qdata_shape(rows, k) for fmt, rows in zip(pair, (m, n)))
    payloads = (SimpleNamespace(shape=shape, device=GPU, is_cuda=True) for shape in shapes)
    a, b = (Operand(qdata, None, None, fmt.name) for qdata, fmt in zip(payloads, pair))
    args, chosen = (SimpleNamespace(is_cuda=True), a, b) if adds else (a, b, out_dtype, None), []

    def choose_on_gpu(name, table, backend, _, *rules):
        chosen.append(choose(name, table, backend, args, *rules).backend)
        return Implementation(Backend.REFERENCE, lambda *args: None if adds else torch.empty(()))

    x = Operand(torch.empty(1, 1), torch.empty(1, 1), None, FP8_1X128.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "choose", choose_on_gpu)
        if adds:
            MATMUL.add_matmul_op(torch.empty(1, 1), x, x, Backend.AUTO)
        else:
            MATMUL.matmul_op(x, x, out_dtype, None, Backend.AUTO)
    return chosen.pop()


# --- the order --------------------------------------------------------------------------------------------------------


# (compute capability, (M, N, K), formats, backend): by tokens on Hopper, and decoded first where there are many rows.
CHOSEN = [
    *(((9, 0), (tokens, 2048, 7168), SQUARE, "gluon") for tokens in (1, 64, 4096, 65536)),
    *(((9, 0), (2048, 7168, tokens), ONE_ROW, "gluon") for tokens in (16, 256)),
    *(((9, 0), (2048, 7168, tokens), ONE_ROW, "cublas") for tokens in (257, 65536)),
    *(((major, 0), (rows, 2048, 7168), NVFP4, "triton") for major in (8, 9) for rows in (1, 64)),
    *(((major, 0), (rows, 2048, 7168), NVFP4, "cublas") for major in (8, 9) for rows in (65, 65536)),
    *(((major, 0), (4096, 2048, 7168), NVFP4, "cublas") for major in (10, 12)),
    *(((major, 0), (4096, 2048, 7168), SQUARE, "triton") for major in (8, 10)),
    ((8, 9), (4096, 2048, 7168), ONE_ROW, "triton"),
]


def case_id(value) -> str:
    return value if isinstance(value, str) else "x".join(getattr(part, "name", str(part)) for part in value)


@pytest.mark.parametrize(("capability", "shape", "pair", "chosen"), CHOSEN, ids=case_id)
def test_auto_chooses_in_silence(capability, shape, pair, chosen, gpu):
    gpu.has_gpu_of(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(*shape, pair) == chosen


def test_on_hopper_deep_gemm_takes_what_pays(gpu, monkeypatch):
    monkeypatch.setattr(deep_gemm_library, "why_absent", lambda: None)
    monkeypatch.setattr(deep_gemm_library, "product_on", lambda device: print)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(16384, 4096, 7168) is Backend.DEEP_GEMM
        assert choice(4096, 4096, 7168) is choice(16384, 4096, 7168, out_dtype=torch.float32) is Backend.GLUON
        monkeypatch.setattr(deep_gemm_library, "product_on", lambda device: "it is broken")
        assert choice(16384, 4096, 7168) is Backend.GLUON


@pytest.mark.parametrize("n", (2048, 2040))
@pytest.mark.parametrize("tokens", (256, 257))
@pytest.mark.parametrize("pair", (SQUARE, ONE_ROW, NVFP4), ids=lambda pair: "-".join(fmt.name for fmt in pair))
@pytest.mark.parametrize("capability", ((8, 9), (9, 0), (10, 0)), ids=str)
@pytest.mark.filterwarnings("ignore:.*auto uses")
def test_what_adds_to_a_sum_is_chosen_like_a_product_of_float32(capability, pair, tokens, n, gpu):
    gpu.has_gpu_of(capability)
    product = choice(2048, n, tokens, pair, torch.float32)
    assert choice(2048, n, tokens, pair, adds=True) is product


def test_what_cannot_run_is_left_for_the_next_with_a_warning(gpu):
    with pytest.warns(UserWarning, match="auto uses gluon instead of cublas: out_dtype must be"):
        assert choice(2048, 7168, 4096, ONE_ROW, torch.float16) is Backend.GLUON
    gpu.has_gluon(False)
    with pytest.warns(UserWarning, match="auto uses cublas instead of gluon: they need Gluon"):
        assert choice(4096, 2048, 7168) is Backend.CUBLAS
    with pytest.warns(UserWarning, match="auto uses triton instead of gluon: they need Gluon"):
        assert choice(4096, 2040, 7168) is Backend.TRITON


# --- when it is made --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not backend.interpreting(), reason="CPU tensors need Triton's interpreter")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_chooses_when_it_runs(monkeypatch):
    pytest.importorskip("torchao_blockwise.ops.gemm.plain.kernels_triton")
    why_not = {"triton": None}
    monkeypatch.setattr(MATMUL, "why_no_kernels", lambda *args: why_not["triton"])
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
