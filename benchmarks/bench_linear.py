"""A linear layer, forward and backward: time, memory and host time, ours compared with bf16 and torchao's recipes.

For each shape and recipe, with bf16 weights, an input that needs its gradient, and a weight quantized in forward and
in backward (fp8_128x128: with these `grad_weight_blocks`; fp8_primary: the Parameter is FP8, whose cast is the
optimizer step's and in no step here):
    graph    a step replayed from a CUDA graph, cold cache
    eager    a step in a loop of eager steps: host and device as in training
    host     until an eager step has been launched
    TFLOP/s  6 · tokens · N · K over the shorter of graph and eager
    memory   what a step has allocated at its peak, with the weight and gradients, and without x and dy
             (layers.py; the JSON has the parts)
Output and gradients must be those of bf16 within FP8's error. Bytes that must move: x, w, dy read once and y, dx, dw
written once. "roofline x" and what of it is reached: see layers.py. The results of --shapes tracker have separate
files, linear_tracker_<device>.

    python benchmarks/bench_linear.py [--shapes 4096x18432x7168] [--only fp8 bf16 torchao]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from common import driver, layers, peers, shapes
from common.layers import Layer, Work, quantized_bytes
from common.shapes import Shape
from torch import nn

DEFAULT_RECIPES = ("fp8", "fp8_128x128", "fp8_primary", "bf16", "torchao", "torchao_tensorwise", "torchao_rowwise")
RECIPES = (*DEFAULT_RECIPES, "fp8_saved", "fp8_128x128_saved", "nvfp4", "nvfp4_full")
# ‖difference to bf16‖ / ‖bf16‖ that a recipe may have: three times what rounding to its elements gives.
_BUDGETS = {recipe: 0.4 if recipe.startswith("nvfp4") else 0.1 for recipe in RECIPES}


def make_layer(shape: Shape, recipe: str, device: torch.device) -> Layer:
    """A linear layer that trains by `recipe`, with the same weight for every recipe; raises peers.Unavailable."""
    torch.manual_seed(0)
    linear = nn.Linear(shape.in_features, shape.out_features, bias=False, device=device, dtype=torch.bfloat16)
    # In a container, because torchao replaces the module that it converts.
    model = peers.convert(nn.Sequential(linear), recipe, device)
    return Layer(model, peers.compile_model(model, device) if recipe in peers.COMPILED else model)


def work_of(shape: Shape, device: torch.device) -> Work:
    """A linear layer of this shape."""
    t, n, k = shape

    def inputs():
        x, dy = (torch.randn(t, width, device=device, dtype=torch.bfloat16) for width in (k, n))
        return x.requires_grad_(), dy

    # x, w and dy read, y, dx and dw written.
    nbytes = 2 * torch.bfloat16.itemsize * (t * n + t * k + n * k)
    return Work(
        {"shape": str(shape)},
        lambda recipe: make_layer(shape, recipe, device),
        inputs,
        nbytes,
        6 * t * n * k,
        _BUDGETS,
        quantized_bytes=quantized_bytes(t, (n, k)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, device = driver.parse(layers.parser(__doc__, shapes.LINEAR, RECIPES, DEFAULT_RECIPES), argv)
    name = "linear_tracker" if args.shapes == shapes.LINEAR["tracker"] else "linear"
    works = [work_of(shape, device) for shape in args.shapes]
    return layers.run(name, ("shape", *layers.COLUMNS), args, works, device)


if __name__ == "__main__":
    sys.exit(main())
