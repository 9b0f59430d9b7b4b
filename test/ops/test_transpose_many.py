"""ops.transpose_many: the transpose of each, whatever the list mixes."""

from __future__ import annotations

import pytest
import torch
from shard_cases import FORMATS, SHAPES, backends, quantize

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_operands_equal, random_tensor


@backends
def test_transpose_many_is_transpose_of_each(backend, device):
    operands = [quantize(random_tensor(*s, device=device), f, torch.bfloat16) for s in SHAPES for f in FORMATS]
    columns = [s[-1] for s in SHAPES for _ in FORMATS]
    got = ops.transpose_many(operands, columns=columns, backend=backend)
    for x, width, result in zip(operands, columns, got):
        want = ops.transpose(x, columns=width, backend="reference")
        assert_operands_equal(result, want)
        assert result.global_scale is x.global_scale
    assert ops.transpose_many([], backend=backend) == []


def test_launches_do_not_grow_with_the_list(device, monkeypatch):
    kernels = pytest.importorskip("torchao_blockwise.ops.transposition.many.kernels_triton")
    tables, make = [], kernels.make_table
    monkeypatch.setattr(kernels, "make_table", lambda *args: tables.append(1) or make(*args))
    operand = quantize(random_tensor(32, 64, device=device), NVFP4_16X16, torch.bfloat16)
    ops.transpose_many([operand], backend="triton")
    alone = len(tables)
    ops.transpose_many([operand] * 7, backend="triton")
    assert len(tables) == 2 * alone


W = torch.ones(4, 16)
REFUSALS = {
    "what": (
        lambda: ops.transpose_many([W]),
        TypeError("transpose_many: operand 0 must be a result of quantize, got Tensor; quantize it first"),
    ),
    "rows": (
        lambda: ops.transpose_many([ops.quantize(W, NVFP4_1X16).rowwise]),
        ValueError(
            "transpose_many: operand 0 in nvfp4_1x16 has blocks of 1x16, a transpose would need other scales; "
            "quantize the high-precision tensor with columnwise=True"
        ),
    ),
    "columns": (
        lambda: ops.transpose_many([ops.quantize(W, NVFP4_16X16).rowwise], columns=[13]),
        ValueError("transpose_many: operand 0 with a payload of shape [4, 8] does not hold columns=13"),
    ),
}


@pytest.mark.parametrize(("call", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, expected):
    with pytest.raises(type(expected)) as error:
        call()
    assert str(error.value) == str(expected)
