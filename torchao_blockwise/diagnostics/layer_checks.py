"""A layer of each recipe: whether its three products are as near to high precision as what they multiply is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import ops
from torchao_blockwise.diagnostics.cases import FEATURES_IN, FEATURES_OUT, TOKENS
from torchao_blockwise.diagnostics.layers import RECIPES
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.tensors import TrainingConfig


class ProductReport(NamedTuple):
    """A product of a layer: its distance from the one in fp32, relative to that, and the largest that can be right."""

    recipe: str
    product: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit


def check_layers(device: torch.device) -> Iterator[ProductReport]:
    """Forward and backward pass of a linear layer by each recipe, beside the same in fp32.

    Two matrices of random values that are off by e1 and e2 have a product that is off by √(e1² + e2²); the limit is
    e1 + e2.
    """
    numbers = torch.Generator().manual_seed(0)
    w, x, dy = (
        torch.randn(*shape, generator=numbers, device="cpu").to(device)
        for shape in ((FEATURES_OUT, FEATURES_IN), (TOKENS, FEATURES_IN), (TOKENS, FEATURES_OUT))
    )
    plain = {"output": x @ w.mT, "grad_input": dy @ w, "grad_weight": dy.mT @ x}
    for recipe in ("fp8", "nvfp4"):
        config = RECIPES[recipe]
        fmt, weight_fmt = config.activation_format, config.weight_format
        errors = {"x": _rounding(x, fmt), "dy": _rounding(dy, fmt), "w": _rounding(w, weight_fmt)}
        of = {"output": ("x", "w"), "grad_input": ("dy", "w"), "grad_weight": ("dy", "x")}
        for name, found in _products(w, x, dy, config).items():
            yield ProductReport(recipe, name, _distance(found, plain[name]), sum(errors[part] for part in of[name]))


def _products(w: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, config: TrainingConfig) -> dict[str, torch.Tensor]:
    layer = nn.Linear(FEATURES_IN, FEATURES_OUT, bias=False, device=w.device)
    with torch.no_grad():
        layer.weight.copy_(w)
    quantize_(layer, config)
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        output = layer(x)
        grad_input, grad_weight = torch.autograd.grad(output, (x, layer.weight), dy)
    return {"output": output.detach(), "grad_input": grad_input, "grad_weight": grad_weight}


def _rounding(x: torch.Tensor, fmt: BlockFormat) -> float:
    return _distance(ops.dequantize(ops.quantize(x, fmt).rowwise, columns=x.shape[1], dtype=torch.float32), x)


def _distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x - expected).norm() / expected.norm()).item()
