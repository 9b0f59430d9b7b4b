"""Tokens in groups and experts' weights for tests of the grouped linear layer, and its results by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import weight
from named_results import tokens
from products_by_hand import grouped_by_hand
from torch import nn

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.testing import assert_bitwise_equal

NAMES = ("output", "grad_input", "grad_weight")
# Sizes of the groups, and tokens after the last one.
ROUTINGS = {
    "one_block_each": ([128, 128, 128], 0), "ragged": ([5, 130, 41], 0), "empty_experts": ([0, 40, 0], 0),
    "one_token_each": ([1, 1, 1], 0), "all_to_one": ([0, 0, 300], 0), "tail": ([10, 0, 7], 30),
    "nothing_but_tail": ([0, 0, 0], 20), "no_tokens": ([0, 0, 0], 0), "one_token": ([0, 1, 0], 0),
}  # fmt: skip
every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def ends_of(sizes, device="cpu") -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def experts(config, e: int = 3, n: int = 40, k: int = 72, dtype=torch.float32, device="cpu") -> nn.Parameter:
    hp = (weight(e, n, k, seed=1) / 64).to(device=device, dtype=dtype)
    return nn.Parameter(MasterWeightTensor(hp, config))


def run(call, x, w, ends, dy):
    """(output, grad_input, grad_weight) of one pass of `call(x, w, ends)` from fresh gradients."""
    w.grad, x = None, x.detach().requires_grad_()
    out = call(x, w, ends)
    out.backward(dy)
    return out.detach(), x.grad, w.grad


def transposed_mm(x, w, ends):
    return F.grouped_mm(x, w.transpose(-2, -1), offs=ends)


def assert_by_hand(config, sizes, tail=0, call=grouped_linear, n=40, k=72, dtype=torch.float32, device="cpu") -> None:
    count = sum(sizes) + tail
    w, ends = experts(config, len(sizes), n, k, dtype, device), ends_of(sizes, device)
    x, dy = (tokens(count, f, dtype=dtype, seed=s, device=device) for f, s in ((k, 3), (n, 7)))
    if tail:
        # What no group has may hold anything.
        x[-tail:], dy[-tail:] = float("nan"), float("inf")
    got = run(call, x, w, ends, dy.to(config.out_dtype or dtype))
    for name, a, b in zip(NAMES, got, grouped_by_hand(x, w.hp, ends, dy.to(config.out_dtype or dtype), config)):
        assert_bitwise_equal(a, b, name)
    for result in got[:2]:
        assert not result[count - tail :].any()
    for size, grad in zip(sizes, got[2]):
        assert size or not grad.any()


CALLS = {
    "transpose": transposed_mm,
    "mT": lambda x, w, ends: torch._grouped_mm(x, w.mT, ends),
    "positional": lambda x, w, ends: torch._grouped_mm(x, w.permute(0, 2, 1), ends, None, None),
    "cast_transposed": lambda x, w, ends: F.grouped_mm(x, w.mT.to(x.dtype), offs=ends),
    "cast": lambda x, w, ends: F.grouped_mm(x, w.to(x.dtype).mT, offs=ends),
    "view": lambda x, w, ends: F.grouped_mm(x, w.view_as(w).mT, offs=ends),
}
