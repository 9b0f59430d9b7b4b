"""Checks of what is replayed, shared by tests of operations and layers; the fixture `replays` goes with them."""

from __future__ import annotations

import torch

from torchao_blockwise.ops import replay

CALLS = 5


def tensors_of(result) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def assert_replayed(call, arguments: list, replays, by_reference: bool = True) -> None:
    """Calls with each of the arguments give the bits of first calls with them, and from the third on are replays.

    by_reference: whether what a CPU runs can be replayed too: it reads no values and no table of its own.
    """
    results = []
    for i, args in enumerate(arguments):
        before = replays()
        results.append(tensors_of(call(*args)))
        is_replayed = i >= 2 and (by_reference or torch.cuda.is_available())
        assert (replays() > before) == is_replayed, f"call {i}"
    for args, result in zip(arguments, results, strict=True):
        replay.forget()
        wanted = tensors_of(call(*args))
        assert len(result) == len(wanted) > 0
        for x, y in zip(result, wanted):
            assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
            assert torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (x, y)))


def values(device, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device=device)
