"""Memory between guards."""

import pytest
import torch

from torchao_blockwise.formats import BlockFormat

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
