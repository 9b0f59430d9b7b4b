"""Values that tests of `Operation` share, and a mode that records operations."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16
from torchao_blockwise.testing import assert_bitwise_equal

NAMESPACE = "torchao_blockwise_test"
X = torch.arange(6.0).reshape(2, 3)
LEAF = torch.ones(2, 3, requires_grad=True)
OPERAND = ops.quantize(torch.ones(2, 128), FP8_1X128, backend="reference").rowwise
WITH_GLOBAL = ops.quantize(torch.ones(2, 128), NVFP4_1X16, backend="reference").rowwise
ENDS = torch.tensor([1, 2], dtype=torch.int32)


class DispatchMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


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
