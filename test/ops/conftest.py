"""Operations of tests, which `define` makes of annotations in a namespace of its own; and memory between guards."""

from __future__ import annotations

import itertools

import pytest
import torch
from defined_ops import NAMESPACE

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops import op as op_module
from torchao_blockwise.ops.backend import Backend, Implementation

# No name twice in a process: PyTorch remembers operations by name, also those whose library is gone.
_numbers = itertools.count()


@pytest.fixture(scope="module")
def namespace():
    """Operations are defined in a namespace of its own, which is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "NAMESPACE", NAMESPACE)
        patch.setattr(op_module, "_library", torch.library.Library(NAMESPACE, "DEF"))
        yield


@pytest.fixture(scope="module")
def define(namespace):
    """define(annotations, fake, run, ..): an operation `op<n>` of arguments with these annotations, and "return"."""

    def define(annotations: dict, fake=lambda *args: None, run=None, **options):
        arguments = ", ".join(name for name in annotations if name != "return")
        scope: dict = {"fake": fake}
        exec(f"def fake_op({arguments}): return fake({arguments})", scope)
        described = scope["fake_op"]
        described.__name__ = f"op{next(_numbers)}_op"
        described.__annotations__ = {"return": None, **annotations}
        table = options.pop("table", (Implementation(Backend.REFERENCE, run or fake),))
        return op_module.define_op(table, **options)(described)

    return define


GUARD, POISON = 4096, 0xA5


@pytest.fixture
def guarded(monkeypatch):
    """Copies are allocated full of poison, between guards that must be whole at the end."""
    buffers = []

    def poisoned(x, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=x.device)
        buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(dtype).view(shape)

    def new_empty(fmt, x, *shape):
        return (
            poisoned(x, fmt.qdata_shape(*shape), fmt.element.storage_dtype),
            poisoned(x, fmt.scale_shape(*shape), fmt.scale_dtype),
        )

    monkeypatch.setattr(BlockFormat, "new_empty", new_empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == POISON).all() and (buffer[-GUARD:] == POISON).all(), "written out of bounds"
