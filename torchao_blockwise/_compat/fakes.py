"""Fake tensors, whose module is private in PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def fake_mode() -> AbstractContextManager[object]:
    """A context in which operations return fake tensors, with device, shape and dtype but no memory."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: torch.Tensor) -> bool:
    """Whether `x` is a fake tensor."""
    from torch._subclasses import FakeTensor

    return isinstance(x, FakeTensor)
