"""AUTO's choice for a plain product: the order on a Hopper GPU, what comes next, and when it is made."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops import Backend, backend
from torchao_blockwise.ops import matmul as matmul_function
from torchao_blockwise.ops.matmul import cublas, reference

MATMUL = sys.modules["torchao_blockwise.ops.matmul"]
GPU = torch.device("cuda:0")
SQUARE, ONE_ROW, NVFP4 = (FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16)


@pytest.fixture
def gpu(monkeypatch):
    """The compute capability that GPUs have here, to be changed, and no reason why a kernel could not run on it."""
    gluon = pytest.importorskip("torchao_blockwise.ops.matmul.kernels_gluon")
    capability = {"of": (9, 0)}
    for module in (backend, MATMUL, cublas):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability["of"])
    monkeypatch.setattr("torchao_blockwise._compat.has_gluon", lambda: True)
    monkeypatch.setattr("torchao_blockwise._compat.has_triton", lambda: True)
    monkeypatch.setattr("torchao_blockwise._compat.why_old_triton", lambda: None)
    monkeypatch.setattr(gluon, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend, "_warned", set())
    return capability


def choice(m, n, k, pair=SQUARE, out_dtype=torch.bfloat16):
    """The backend of a[m, k] · b[n, k]ᵀ on a GPU."""
    a_fmt, b_fmt = pair
    shapes = a_fmt.qdata_shape(m, k), b_fmt.qdata_shape(n, k)
    return MATMUL._pick(GPU, *shapes, a_fmt.name, b_fmt.name, out_dtype, "auto")


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, 64, 4096, 65536))
def test_on_hopper_square_blocks_go_to_gluon(tokens, gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(tokens, 2048, 7168) is Backend.GLUON


@pytest.mark.parametrize(("tokens", "chosen"), ((16, "gluon"), (256, "gluon"), (257, "cublas"), (65536, "cublas")))
def test_on_hopper_one_row_blocks_go_by_their_tokens(tokens, chosen, gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(2048, 7168, tokens, ONE_ROW) == chosen


@pytest.mark.parametrize(
    ("capability", "pair", "chosen"),
    (
        ((8, 0), SQUARE, "triton"),
        ((8, 9), ONE_ROW, "triton"),
        ((9, 0), NVFP4, "triton"),
        ((10, 0), SQUARE, "triton"),
        ((10, 0), NVFP4, "cublas"),
        ((12, 0), NVFP4, "cublas"),
    ),
    ids=lambda x: x if isinstance(x, str) else "_".join(getattr(part, "name", str(part)) for part in x),
)
def test_elsewhere_gluon_is_none(capability, pair, chosen, gpu):
    gpu["of"] = capability
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(4096, 2048, 7168, pair) == chosen


def test_what_cannot_run_is_left_for_the_next_with_a_warning(gpu, monkeypatch):
    with pytest.warns(UserWarning, match="auto uses gluon instead of cublas: out_dtype must be"):
        assert choice(2048, 7168, 4096, ONE_ROW, torch.float16) is Backend.GLUON
    monkeypatch.setattr("torchao_blockwise._compat.has_gluon", lambda: False)
    with pytest.warns(UserWarning, match="auto uses cublas instead of gluon: they need Gluon"):
        assert choice(4096, 2048, 7168) is Backend.CUBLAS
    with pytest.warns(UserWarning, match="auto uses triton instead of gluon: they need Gluon"):
        assert choice(4096, 2040, 7168) is Backend.TRITON


def test_a_gpus_choice_is_made_once_for_shapes_and_formats(gpu, monkeypatch):
    made, candidates = [], MATMUL.candidates
    monkeypatch.setattr(MATMUL, "candidates", lambda *args: made.append(args) or candidates(*args))
    MATMUL._pick_on_gpu.cache_clear()
    try:
        for n in (2048, 4096, 2048):
            arguments = GPU, torch.Size((64, 7168)), torch.Size((n, 7168)), *(fmt.name for fmt in SQUARE)
            assert MATMUL._pick_on_gpu(*arguments, torch.bfloat16, "auto") is Backend.GLUON
    finally:
        MATMUL._pick_on_gpu.cache_clear()
    assert [b_shape[0] for _, _, b_shape, *_ in made] == [2048, 4096]


# --- when it is made --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_chooses_when_it_runs(monkeypatch):
    triton = pytest.importorskip("torchao_blockwise.ops.matmul.kernels_triton")
    why_not = {"triton": None}
    monkeypatch.setattr(MATMUL, "why_no_triton", lambda device: why_not["triton"])
    computed_by, matmul = [], reference.matmul
    for name, module in {"reference": reference, "triton": triton}.items():
        monkeypatch.setattr(module, "matmul", lambda *args, name=name: computed_by.append(name) or matmul(*args))

    def product():
        x, w = torch.randn(64, 128), torch.randn(256, 128)
        a, b = ops.quantize(x, FP8_1X128, backend="reference"), ops.quantize(w, FP8_128X128, backend="reference")
        return matmul_function(a, b, out_dtype=torch.float32)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    compiled()
    why_not["triton"] = "it was taken away"
    compiled()
    assert computed_by == ["triton", "reference"]
