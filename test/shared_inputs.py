"""What tests of fused modules share: results compared bit for bit, and a count of what is quantized."""

from __future__ import annotations

import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise.testing import assert_bitwise_equal

OPS = torch.ops.torchao_blockwise


def assert_same(got, expected) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise_equal(a, b, str(index))


class Counter(TorchDispatchMode):
    """Counts the operations of this package."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))

    @property
    def quantized(self) -> int:
        """How many activations and gradients were quantized."""
        return self.ran[OPS.quantize_both] + self.ran[OPS.quantize]


def quantizations(run) -> int:
    with Counter() as counter:
        run()
    return counter.quantized
