"""Operations of tests, which `define` makes in a separate namespace; and memory between guards."""

import itertools

import pytest
import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops import registry
from torchao_blockwise.ops.backend import Backend, Implementation

NAMESPACE = "torchao_blockwise_test"
# No name twice in a process: PyTorch remembers operations by name, also those whose library is gone.
_numbers = itertools.count()


@pytest.fixture(scope="module")
def define():
    """define(arguments, returns, run, ..): an operation `op<n>` of this schema, in a namespace that goes afterwards."""

    def define(arguments: str, returns: str = "()", run=lambda *args: None, **options):
        schema = f"op{next(_numbers)}({arguments}) -> {returns}"
        return registry.Operation(schema, table=[Implementation(Backend.REFERENCE, run)], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "NAMESPACE", NAMESPACE)
        patch.setattr(registry, "_library", torch.library.Library(NAMESPACE, "DEF"))
        yield define


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
