"""Results of a layer's pass by name, and tokens, for tests of layers that are compared with their operations."""

from __future__ import annotations

import torch

from torchao_blockwise.testing import assert_bitwise_equal, random_tensor


def tokens(*shape: int, dtype=torch.float32, seed: int = 3, device="cpu") -> torch.Tensor:
    return random_tensor(1, *shape, dtype=dtype, seed=seed, device=device)[0] / 64


def results(layer, x, dy=None, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of one pass from fresh gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = (layer if run is None else run)(x)
    out.backward(torch.ones_like(out) if dy is None else dy)
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, t in got.items():
        assert_bitwise_equal(t, expected[name], name)
