"""Operations that are replayed: the bits of first calls, new tensors, and what is left out."""

from __future__ import annotations

import pytest
import torch
from replayed import CALLS, assert_replayed, values

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops import replay

pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.mark.parametrize("shape", [(256, 384), (33, 100), (2, 40, 64), (5, 1)])
@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16], ids=lambda fmt: fmt.name)
def test_quantize(device, fmt, shape, replays):
    inputs = [(values(device, *shape),) for _ in range(CALLS)]
    assert_replayed(lambda x: ops.quantize(x, fmt, columnwise=True), inputs, replays)


@pytest.mark.parametrize("shape", [(256, 384, 128), (33, 112, 70), (1, 8, 16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "pair", [(FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16)], ids=lambda pair: pair[1].name
)
def test_matmul(device, pair, bias, shape, replays):
    m, n, k = shape

    def inputs():
        a, b = (ops.quantize(values(device, rows, k), fmt).rowwise for rows, fmt in zip((m, n), pair))
        return a, b, values(device, n) if bias else None

    assert_replayed(
        lambda a, b, bias: ops.matmul(a, b, out_dtype=torch.bfloat16, bias=bias),
        [inputs() for _ in range(CALLS)],
        replays,
        by_reference=pair[0] is FP8_1X128,
    )


def test_what_is_added_to_is_changed(device, replays):
    a, b = (ops.quantize(values(device, rows, 256), FP8_1X128).rowwise for rows in (128, 96))
    product = ops.matmul(a, b, out_dtype=torch.float32)
    out = torch.zeros(128, 96, device=device)
    for i in range(CALLS):
        ops.add_matmul_(out, a, b)
        # Sums of few multiples of one number are exact up to their last rounding.
        torch.testing.assert_close(out, product * (i + 1), rtol=1e-6, atol=0)
    assert replays() >= CALLS - 2


@pytest.mark.parametrize("along", ["m", "k"])
def test_groups_are_those_of_the_call(device, along, replays):
    """How many tokens an expert has is known on the device alone, and may change with every call."""

    def inputs(*ends):
        groups = torch.tensor(ends, dtype=torch.int32, device=device)
        x, dy = (values(device, 300, width) for width in (256, 128))
        a, b = (ops.grouped_quantize(t, groups, FP8_1X128, columnwise=True) for t in (dy, x))
        w = ops.quantize(values(device, 3, 128, 256), FP8_128X128).rowwise
        return (b.rowwise, w, groups) if along == "m" else (a.columnwise, b.columnwise, groups)

    arguments = [inputs(*ends) for ends in ((10, 20, 300), (0, 300, 300), (100, 200, 300), (1, 1, 1), (299, 300, 300))]
    assert_replayed(
        lambda a, b, groups: ops.grouped_matmul(a, b, groups, along=along, out_dtype=torch.bfloat16),
        arguments,
        replays,
        by_reference=False,
    )


def test_results_are_the_callers(replays):
    """No call's results are overwritten by a later one."""
    x = torch.randn(64, 128)
    outs = [ops.quantize(x * i, FP8_1X128).rowwise.scale for i in range(1, 8)]
    assert len({out.data_ptr() for out in outs}) == 7 and replays() > 0
    for i, out in enumerate(outs, 1):
        assert torch.equal(out, outs[0] * i) or torch.allclose(out, outs[0] * i)


def test_shapes_that_come_once_are_not_recorded(replays, monkeypatch):
    monkeypatch.setattr(replay, "record", lambda *args: pytest.fail("recorded"))
    for rows in range(1, 20):
        ops.quantize(torch.randn(rows, 64), FP8_1X128)
    assert replays() == 0


def test_operations_that_tables_of_addresses_lead_are_not_replayed(device, replays):
    for _ in range(CALLS):
        made = [ops.quantize(values(device, rows, 128), FP8_128X128, backend="reference") for rows in (64, 200)]
        operands = [copies.rowwise for copies in made]
        before = replays()
        for x, y in zip(operands, ops.transpose_many(operands, columns=[128, 128]), strict=True):
            assert torch.equal(y.qdata.view(torch.uint8), x.qdata.view(torch.uint8).t())
        assert replays() == before
