"""What DeepGEMM is called with along "m", by a stand-in that checks what its interface does; it needs a Hopper GPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.grouped_matmul import candidates, deep_gemm
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
from test_grouped_matmul import ROUTINGS, Case

TILE = 128
ALIGNMENT_BYTES = 16


class StandIn(types.ModuleType):
    """`deep_gemm` with the checks of its m_grouped_fp8_gemm_nt_contiguous, which multiplies tile by tile."""

    def __init__(self):
        super().__init__("deep_gemm")
        self.calls = 0

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return TILE

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        self.calls += 1
        (a, a_scale), (b, b_scale) = a, b
        (m, k), (groups, n, _) = a.shape, b.shape
        assert a.dtype == b.dtype == torch.float8_e4m3fn and b.shape == (groups, n, k)
        assert a.is_contiguous() and b.is_contiguous() and d.is_contiguous()
        assert m % TILE == 0 and k % ALIGNMENT_BYTES == 0
        # Copied by TMA with rows side by side, 16 bytes apart.
        assert a_scale.shape == (m, k // TILE) and a_scale.dtype == torch.float32
        assert a_scale.stride() == (1, m) and m % (ALIGNMENT_BYTES // 4) == 0
        assert b_scale.shape == (groups, -(-n // TILE), k // TILE) and b_scale.dtype == torch.float32
        assert b_scale.is_contiguous()
        assert d.shape == (m, n) and d.dtype == torch.bfloat16
        assert grouped_layout.shape == (m,) and grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
        d.fill_(float("nan"))
        for start in range(0, m, TILE):
            rows, group = slice(start, start + TILE), int(grouped_layout[start])
            assert -1 <= group < groups and (grouped_layout[rows] == group).all()
            if group >= 0:
                tile = ops.operand(FP8_1X128, a[rows], a_scale[rows].t().contiguous())
                weight = ops.operand(FP8_128X128, b[group], b_scale[group])
                d[rows] = ops.matmul(tile, weight, out_dtype=torch.bfloat16, backend="reference")


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in where DeepGEMM is looked for, and a CPU that passes for a Hopper GPU."""
    module = StandIn()
    monkeypatch.setattr(_compat, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(_compat, "deep_gemm", lambda: module)
    monkeypatch.setattr(deep_gemm, "compute_capability", lambda device: (9, 0))
    return module


def case_of(routing, n: int = 192, k: int = 256) -> Case:
    return Case("m", (FP8_1X128, FP8_128X128), routing, "cpu", n, k)


@pytest.mark.parametrize("routing", [r for r in ROUTINGS.values() if sum(r[0]) + r[1]], ids=lambda r: str(r[0]))
def test_each_row_comes_back_from_its_group(routing, stand_in):
    case = case_of(routing)
    out = case.run(torch.bfloat16, backend="deep_gemm")
    assert stand_in.calls == 1
    assert_bitwise_equal(out, case.run(torch.bfloat16, backend="reference"))


def test_tokens_of_no_group_reach_nobody(stand_in):
    case = case_of(([130, 0, 3], 9))
    expected = case.run(torch.bfloat16, backend="reference")
    case.a.qdata[133:].view(torch.uint8).fill_(0x7F)
    case.a.scale[:, 133:] = float("nan")
    assert_bitwise_equal(case.run(torch.bfloat16, backend="deep_gemm"), expected)


def why_not(a_fmt=FP8_1X128, b_fmt=FP8_128X128, m=8, n=128, k=256, along="m", out_dtype=torch.bfloat16):
    shapes = a_fmt.qdata_shape(m, k), b_fmt.qdata_shape(2, n, k)
    return candidates(torch.device("cpu"), *shapes, a_fmt, b_fmt, along, out_dtype)[Backend.DEEP_GEMM]


@pytest.mark.parametrize(
    ("options", "reason"),
    (
        ({}, None),
        (
            {"along": "k"},
            'along "k" it needs the sizes of the groups on the host, and reading them would wait for the GPU',
        ),
        ({"b_fmt": FP8_1X128}, "it multiplies fp8_1x128 · fp8_128x128, got fp8_1x128 · fp8_1x128"),
        (
            {"a_fmt": NVFP4_1X16, "b_fmt": NVFP4_16X16},
            "it multiplies fp8_1x128 · fp8_128x128, got nvfp4_1x16 · nvfp4_16x16",
        ),
        ({"out_dtype": torch.float32}, "it writes bfloat16, got torch.float32"),
        ({"m": 0}, "it has no empty products, got M=0, N=128, K=256"),
        ({"k": 200}, "K must be a multiple of 128 and N of 64, got N=128, K=200"),
        ({"n": 96}, "K must be a multiple of 128 and N of 64, got N=96, K=256"),
    ),
    ids=("can", "along_k", "one_row", "nvfp4", "out_dtype", "empty", "K", "N"),
)
def test_says_why_it_cannot(options, reason, stand_in):
    assert why_not(**options) == reason


def test_says_that_it_is_not_installed(stand_in, monkeypatch):
    monkeypatch.setattr(_compat, "has_deep_gemm", lambda: False)
    assert why_not() == "deep_gemm is not installed (pip install sgl-deep-gemm==0.1.4 apache-tvm-ffi==0.1.11)"


def test_auto_never_takes_it(stand_in):
    case_of(([130, 3], 0)).run(torch.bfloat16)
    assert stand_in.calls == 0


def test_refused_off_hopper():
    with pytest.raises(ValueError, match=r"deep_gemm cannot run: it needs a Hopper GPU \(sm_90\), got cpu; choose"):
        case_of(([3, 4], 0)).run(torch.bfloat16, backend="deep_gemm")
