"""Backends of plain and grouped GEMMs: what each takes and why not the rest, AUTO's order on each GPU, and when."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import deep_gemm_library
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import Backend, backend
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


LARGE = ((8192, 8192, 4096), (32768, 2048, 4096), (16384, 4096, 7168))
SMALL = ((8191, 8192, 4096), (8192, 8192, 4080), (32768, 2040, 8192), (2047, 32768, 8192), (8192, 8196, 4096))


@pytest.mark.filterwarnings("error")
def test_on_hopper_deep_gemm_takes_what_pays(gpu, monkeypatch):
    def taken(by_library, **options) -> set:
        monkeypatch.setattr(deep_gemm_library, "product_on", lambda device: by_library)
        return {shape for shape in LARGE + SMALL if choice(*shape, **options) is Backend.DEEP_GEMM}

    assert not taken(print)
    monkeypatch.setattr(deep_gemm_library, "why_absent", lambda: None)
    assert taken(print) == set(LARGE)
    assert not taken(print, out_dtype=torch.float32) | taken("it is broken")
    assert not any(choice(*shape, adds=True) is Backend.DEEP_GEMM for shape in LARGE)


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


# A format of e4m3 that no library knows: the element is not what they go by.
FP8_1X64 = dataclasses.replace(FP8_1X128, name="fp8_1x64", block=(1, 64))
PAYLOADS = (128, 128), (128, 128)
EXPERTS = (64, 128), (8, 256, 128)
# What changes of a GEMM that the backend takes, payloads in bytes: why it does not take that, or None.
REASONS = {
    "cublas": (
        {"pair": SQUARE, "shapes": PAYLOADS, "cuda": "12.9"},
        [
            ({}, None),
            ({"shapes": ((4, 16), (16, 16)), "out_dtype": torch.float32}, None),
            ({"shapes": ((64, 592), (128, 592)), "pair": ONE_ROW, "cuda": "13.0"}, None),
            ({"shapes": ((6, 25), (16, 25))}, None),
            ({"shapes": ((1, 16), (32, 16)), "pair": NVFP4, "capability": (10, 0)}, None),
            ({"shapes": ((7, 25), (32, 25)), "pair": NVFP4, "capability": (12, 0)}, None),
            ({"shapes": ((16, 16), (8, 16)), "pair": NVFP4, "cuda": "12.8"}, None),
            ({"capability": (8, 0)}, "e4m3 block scaling needs sm_90, got sm_80"),
            ({"capability": (10, 0)}, "e4m3 block scaling needs sm_90, got sm_100"),
            ({"cuda": "12.8"}, "block scaling needs CUDA 12.9 or newer, got 12.8"),
            ({"cuda": None}, "block scaling needs CUDA 12.9 or newer, got None"),
            ({"pair": SQUARE[::-1]}, "cuBLASLt does not support fp8_128x128 · fp8_1x128"),
            ({"pair": (FP8_1X64, FP8_1X64)}, "cuBLASLt does not support fp8_1x64 · fp8_1x64"),
            ({"out_dtype": torch.float16}, "out_dtype must be bfloat16 or float32, got torch.float16"),
            ({"shapes": ((0, 16), (16, 16))}, "cuBLASLt does not support empty GEMMs, got M=0, N=16, K=16"),
            ({"shapes": ((16, 16), (8, 16))}, "N must be a multiple of 16, got N=8"),
        ],
    ),
    "deep_gemm": (
        {"pair": SQUARE, "shapes": ((8, 128), (64, 128))},
        [
            ({}, None),
            ({"capability": (10, 0)}, "DeepGEMM needs a Hopper GPU (sm_90), got sm_100"),
            ({"pair": ONE_ROW}, "DeepGEMM supports fp8_1x128 · fp8_128x128, got fp8_1x128 · fp8_1x128"),
            ({"pair": NVFP4}, "DeepGEMM supports fp8_1x128 · fp8_128x128, got nvfp4_1x16 · nvfp4_16x16"),
            ({"out_dtype": torch.float32}, "DeepGEMM supports bfloat16 without bias, got torch.float32"),
            ({"bias": torch.zeros(64)}, "DeepGEMM supports bfloat16 without bias, got torch.bfloat16 and a bias"),
            *(
                (
                    {"shapes": ((m, k), (n, k))},
                    f"K must be a multiple of 16 and N of 8, and none may be 0, got M={m}, N={n}, K={k}",
                )
                for m, n, k in ((0, 64, 128), (8, 0, 128), (8, 64, 0), (8, 64, 24), (8, 12, 128))
            ),
        ],
    ),
    "cutlass": (
        {"pair": NVFP4, "shapes": EXPERTS, "capability": (10, 0), "along": "m"},
        [
            ({}, None),
            ({"capability": (10, 3), "shapes": ((7, 16), (1, 16, 16)), "pair": NVFP4_ROWS}, None),
            ({"device": "cpu"}, "the kernels are for Blackwell GPUs (sm_100), got cpu"),
            ({"capability": (9, 0)}, "the kernels are for Blackwell GPUs (sm_100), got sm_90"),
            ({"capability": (12, 0)}, "the kernels are for Blackwell GPUs (sm_100), got sm_120"),
            ({"pair": SQUARE}, "the kernels support only e2m1 elements, got fp8_1x128 · fp8_128x128"),
            ({"along": "k"}, 'the kernels support only along "m", got along "k"'),
            ({"out_dtype": torch.float32}, "out_dtype must be bfloat16, got torch.float32"),
            ({"shapes": ((0, 16), (2, 16, 16))}, "the kernels do not support empty GEMMs, got M=0, N=16, K=16"),
            *(
                (
                    {"shapes": ((4, k), (2, n, k))},
                    f"N and the bytes of packed K must be multiples of 16, got N={n}, K={k}",
                )
                for n, k in ((24, 16), (32, 8))
            ),
            ({"shapes": ((4, 16), (1025, 16, 16))}, "the kernels support at most 1024 groups, got 1025"),
            ({"kernels": "PyTorch has none"}, "PyTorch has none"),
            ({"triton": False}, "triton is not installed (pip install triton)"),
        ],
    ),
    "gluon": (
        {"pair": SQUARE, "shapes": EXPERTS, "along": "m"},
        [
            ({}, None),
            ({"pair": NVFP4}, None),
            *(({"pair": pair, "along": "k", "shapes": PAYLOADS}, None) for pair in (SQUARE, ONE_ROW, NVFP4_ROWS)),
            (
                {"pair": ONE_ROW},
                "the kernels support fp8_1x128 · fp8_128x128 or nvfp4_1x16 · nvfp4_16x16 or nvfp4_1x16 · nvfp4_1x16,"
                " got fp8_1x128 · fp8_1x128",
            ),
            *(
                (
                    {"shapes": shapes},
                    "TMA does not support empty tensors, got payloads of shape {} and {}".format(*map(list, shapes)),
                )
                for shapes in (((0, 128), (8, 256, 128)), ((64, 128), (8, 0, 128)))
            ),
            ({"interprets": True}, "Triton's interpreter does not support Gluon"),
            ({"triton": False}, "triton is not installed (pip install triton)"),
        ],
    ),
}
ROWS_OF_REASONS = [
    pytest.param(name, takes | changes, reason, id=f"{name}-{reason}-{i}")
    for name, (takes, rows) in REASONS.items()
    for i, (changes, reason) in enumerate(rows)
]


@pytest.mark.parametrize(("name", "gemm", "reason"), ROWS_OF_REASONS)
def test_what_each_backend_takes_and_why_not_the_rest(name, gemm, reason, gpu):
    gpu.has_gpu_of(gemm.get("capability", (9, 0)))
    gpu.has_cuda(gemm.get("cuda", "13.0"))
    gpu.has_triton(gemm.get("triton", True))
    gpu.patch.setattr(backend, "interpreting", lambda: gemm.get("interprets", False))
    gpu.patch.setattr(deep_gemm_library, "product_on", lambda device: print)
    gpu.patch.setattr(cutlass, "_why_not_built", lambda device: gemm.get("kernels"))
    gpu.patch.setitem(FORMATS, FP8_1X64.name, FP8_1X64)
    device = torch.device(gemm.get("device", GPU))
    payloads = [SimpleNamespace(shape=torch.Size(shape), device=device, is_cuda=True) for shape in gemm["shapes"]]
    a, b = (Operand(payload, None, None, fmt.name) for payload, fmt in zip(payloads, gemm["pair"]))
    out_dtype, along = gemm.get("out_dtype", torch.bfloat16), gemm.get("along")
    op, rest = (
        (grouped_matmul_op, (None, along, out_dtype)) if along else (PLAIN.matmul_op, (out_dtype, gemm.get("bias")))
    )
    (row,) = (row for row in op.table if row.backend.value == name)
    assert row.reason((a, b, *rest)) == reason


@pytest.mark.skipif(not backend.interpreting(), reason="CPU tensors need Triton's interpreter")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_chooses_when_it_runs(machine):
    launches = machine.launches_of(pytest.importorskip("torchao_blockwise.ops.gemm.kernels_triton"))
    a, b = (ops.quantize(torch.randn(64, 128), fmt, backend="reference").rowwise for fmt in SQUARE)
    compiled = torch.compile(lambda: ops.matmul(a, b, out_dtype=torch.float32), fullgraph=True, backend="aot_eager")
    compiled()
    assert len(launches) == 1
    machine.patch.setattr(PLAIN, "why_no_kernels", lambda *args: "they were taken away")
    compiled()
    assert len(launches) == 1
