"""Fake tensors: shapes, dtypes and devices without memory; where they are defined is not promised."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def fake_mode() -> AbstractContextManager[object]:
    """A context in which tensors are fake: they have a device, shapes and dtypes, and no memory."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: torch.Tensor) -> bool:
    """Whether `x` has a device, a shape and a dtype, and no memory."""
    from torch._subclasses import FakeTensor

    return isinstance(x, FakeTensor)
