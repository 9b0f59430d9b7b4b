"""Copies of one-row FP8 blocks by the Gluon kernel: when it is taken, and its bits on a GPU.

What it takes: test_gluon_tiles.py. Its bits without a GPU: test_compiled_kernels.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.testing import assert_operands_equal, random_tensor, shape_id, with_special_values

pytest.importorskip("triton")
if not _compat.has_gluon():
    pytest.skip("needs Gluon of Triton 3.6 or newer", allow_module_level=True)

from torchao_blockwise.ops import gluon_tiles
from torchao_blockwise.ops.grouped_quantize import kernels_triton as grouped
from torchao_blockwise.ops.quantize import kernels_gluon as gluon
from torchao_blockwise.ops.quantize import kernels_triton as kernels


@pytest.fixture
def taken(monkeypatch):
    """Calls of the kernel's launchers, which launch nothing; every GPU will do."""
    calls = []

    def taken_for(result):
        def launcher(*arguments):
            calls.append(arguments)
            return result

        return launcher

    monkeypatch.setattr(gluon, "quantize_both", taken_for("rowwise and columnwise"))
    monkeypatch.setattr(gluon, "quantize_columnwise", taken_for("columnwise"))
    monkeypatch.setattr(gluon_tiles, "why_not", gluon_tiles.why_not_this)
    return calls


def test_is_not_taken_where_the_tables_say_never(taken, monkeypatch, device):
    monkeypatch.setattr(kernels, "_FP8_BOTH_GLUON_WARPS", None)
    monkeypatch.setattr(kernels, "_FP8_COLUMNWISE_GLUON", None)
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    for rowwise in (True, False):
        ops.quantize(x, FP8_1X128, rowwise=rowwise, columnwise=True, backend="triton")
    assert taken == []


def test_is_taken_where_it_can(taken, monkeypatch, device):
    monkeypatch.setattr(kernels, "_FP8_BOTH_GLUON_WARPS", 8)
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    assert kernels.quantize(x, FP8_1X128, None, True, True, True) == "rowwise and columnwise"
    assert taken == [(x, FP8_1X128, True, 8)]


def test_is_taken_for_the_columnwise_copy_alone(taken, monkeypatch, device):
    monkeypatch.setattr(kernels, "_FP8_COLUMNWISE_GLUON", (64, 2))
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    assert kernels.quantize(x, FP8_1X128, None, False, True, True) == "columnwise"
    assert taken == [(x, FP8_1X128, True, 64, 2, None, None)]


def test_is_not_taken_for_the_rowwise_copy_alone(taken, device):
    kernels.quantize(torch.zeros(16, 16, dtype=torch.bfloat16, device=device), FP8_1X128, None, True, False, False)
    assert taken == []


def test_two_launches_where_it_cannot(taken, monkeypatch, device):
    monkeypatch.setattr(kernels, "_FP8_BOTH_GLUON_WARPS", 8)
    x = random_tensor(33, 150, dtype=torch.bfloat16, device=device)
    got = ops.quantize(x, FP8_1X128, columnwise=True, backend="triton")
    for copy, expected in zip(got, ops.quantize(x, FP8_1X128, columnwise=True, backend="reference"), strict=True):
        assert_operands_equal(copy, expected)
    assert taken == []


def test_is_taken_for_tokens_in_groups(taken, monkeypatch, device):
    monkeypatch.setattr(kernels, "_FP8_BOTH_GLUON_WARPS", 8)
    x = torch.zeros(17, 16, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([5, 15], dtype=torch.int32, device=device)
    assert "".join(grouped.quantize(x, ends, FP8_1X128, None, True, True, False)) == "rowwise and columnwise"
    ((tokens, *arguments, blocks, rows),) = taken
    assert tokens is x and arguments == [FP8_1X128, False, 8] and rows == 256
    # The tokens as a whole; each group; those of no group.
    assert blocks.tolist() == [[0, 15, 17, 0], [0, 5, 5, 0], [5, 15, 15, 0], [15, 15, 17, 0]]
    grouped.quantize(x.float(), ends, FP8_1X128, None, True, True, False)
    assert len(taken) == 1
    grouped.quantize(x, ends, FP8_1X128, None, False, True, False)
    assert taken[1][1:5] == (FP8_1X128, False, *kernels._FP8_COLUMNWISE_GLUON)
    assert taken[1][5].tolist() == blocks.tolist() and taken[1][6] == 256


@pytest.mark.gpu
@pytest.mark.parametrize("power_of_2_scales", (False, True), ids=("any scale", "power of 2"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("warps", (4, 8, 16))
@pytest.mark.parametrize(
    "shape", ((16, 16), (128, 128), (1, 16), (127, 272), (1041, 2064), (0, 16), (16, 0)), ids=shape_id
)
def test_bits_on_a_gpu(shape, warps, dtype, power_of_2_scales, monkeypatch):
    x = with_special_values(random_tensor(*shape, dtype=dtype, device="cuda"), FP8_1X128)
    if x.numel() > 2**10:
        x[5, 11], x[21, 30], x[-1, -1] = float("nan"), float("inf"), -float("inf")
    reason = gluon_tiles.why_not(FP8_1X128, x)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(kernels, "_FP8_BOTH_GLUON_WARPS", warps)
    monkeypatch.setattr(kernels, "_FP8_COLUMNWISE_GLUON", (64, warps))
    quantize = functools.partial(ops.quantize, x, FP8_1X128, columnwise=True, power_of_2_scales=power_of_2_scales)
    for copy, expected in zip(quantize(backend="triton"), quantize(backend="reference"), strict=True):
        assert_operands_equal(copy, expected)
    assert_operands_equal(quantize(rowwise=False, backend="triton"), quantize(rowwise=False, backend="reference"))
