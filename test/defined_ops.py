"""What tests of `define_op` share: values, `way`, which says how an operation was called, and a watching mode."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16
from torchao_blockwise.testing import assert_bitwise_equal

NAMESPACE = "torchao_blockwise_test"
DIRECT, DISPATCHED = "direct", "dispatched"
X = torch.arange(6.0).reshape(2, 3)
LEAF = torch.ones(2, 3, requires_grad=True)
OPERAND = ops.quantize(torch.ones(2, 128), FP8_1X128, backend="reference").rowwise
WITH_GLOBAL = ops.quantize(torch.ones(2, 128), NVFP4_1X16, backend="reference").rowwise
ENDS = torch.tensor([1, 2], dtype=torch.int32)


def way() -> str:
    """How the implementation that asks was reached."""
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("compute"):
        frame = frame.f_back
    ways = {"call": DIRECT, "run": DISPATCHED}
    return ways[frame.f_code.co_name]


class DispatchMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# A mode that changes nothing makes every call a dispatched one.
both_ways = pytest.mark.parametrize("watching", (contextlib.nullcontext, DispatchMode), ids=(DIRECT, DISPATCHED))


def schema_of(op) -> str:
    """Without the name."""
    schema = str(op.overload._schema)
    return schema[schema.index("(") :]


def assert_same(got, given) -> None:
    assert type(got) is type(given)
    if isinstance(given, (list, tuple)):
        assert len(got) == len(given)
        for a, b in zip(got, given):
            assert_same(a, b)
    elif isinstance(given, torch.Tensor):
        assert_bitwise_equal(got, given)
    else:
        assert got == given
