"""A mixture's experts, forward and backward: time, memory and the quantizers' share, compared with bf16 and torchao.

The whole MLP of all experts of one GPU, tokens sorted already, bf16 weights, quantized forward and backward. Recipes:
    fp8, nvfp4       SwiGLUExperts; nvfp4 without the random Hadamard transform and stochastic rounding
    nvfp4_full       with both
    fp8_128x128      the same as fp8 with `grad_weight_blocks` of that name
    *_saved          the same with `save_weights="quantized"`: each weight is quantized once
    fp8_primary      the same as fp8 with Parameters in FP8, whose cast is the optimizer step's and in no step here
    bf16             torch's grouped GEMM, silu and multiply; bf16_compiled: the same by torch.compile
    torchao          the same with torchao's blockwise FP8 grouped GEMM, which runs DeepGEMM
Columns as in bench_linear: graph, eager, host, TFLOP/s of 18 · tokens · hidden · dim. "quantize %" is the share of
device time in kernels that quantize, SwiGLU where it is fused with that. "memory MiB" is what a step has allocated at
its peak, with weights and gradients, and without x and dy (layers.py; the JSON has the parts).
Output and gradients must be those of bf16 within the recipe's error. Bytes that must move: x, the weights and dy read
once and y, dx and their gradients written once.

    python benchmarks/bench_moe.py [--shapes mixtral_8x7b 16384x8x1408x2048] [--routings skewed] [--only fp8 bf16]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from common import driver, layers, peers, shapes
from common.kernel_times import kernels_of, longest
from common.layers import OURS, Layer, Work
from common.shapes import ROUTINGS, Experts, group_ends
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise.conversion import experts as experts_filter
from torchao_blockwise.nn import SwiGLUExperts

DEFAULT_RECIPES = (
    *("fp8", "fp8_saved", "fp8_128x128", "fp8_128x128_saved", "fp8_primary"),
    *("bf16", "bf16_compiled", "torchao"),
)
RECIPES = (*DEFAULT_RECIPES, "nvfp4", "nvfp4_full")
COLUMNS = ("shape", "routing", *layers.COLUMNS, "quantize %")
# Of two GEMMs, one on what the other gives.
_BUDGETS = {recipe: 0.6 if recipe.startswith("nvfp4") else 0.15 for recipe in RECIPES} | {"bf16_compiled": 0.02}


class PlainExperts(nn.Module):
    """The same MLP of two grouped GEMMs (x, weight [E, K, N], ends) -> [M, N], as frameworks write it."""

    def __init__(self, like: SwiGLUExperts, product: Callable):
        super().__init__()
        self.gate_up, self.down, self.product = like.gate_up, like.down, product

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = self.product(x, self.gate_up.transpose(-2, -1), ends).chunk(2, 1)
        return self.product(F.silu(gate) * up, self.down.transpose(-2, -1), ends)


def make_layer(shape: Experts, recipe: str, ends: torch.Tensor) -> Layer:
    """The experts with the same weights for every recipe; raises peers.Unavailable."""
    device = ends.device
    torch.manual_seed(0)
    model: nn.Module = SwiGLUExperts(shape.experts, shape.dim, shape.hidden, device=device, dtype=torch.bfloat16)
    if recipe in OURS:
        quantize_(model, peers.OUR_CONFIGS[recipe], filter_fn=experts_filter())
    elif recipe == "torchao":
        model = PlainExperts(model, peers.torchao_grouped_product(device, (2 * shape.hidden, shape.hidden, shape.dim)))
    else:
        model = PlainExperts(model, lambda x, weight, ends: F.grouped_mm(x, weight, offs=ends))
    call = peers.compile_model(model, device) if recipe in peers.COMPILED else model
    return Layer(model, lambda x: call(x, ends))


def floor_bytes(shape: Experts, ends: torch.Tensor) -> int:
    """In bf16: x and dy read, y and dx written, weights that have tokens read, gradients of all written."""
    used = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    weights = 3 * shape.hidden * shape.dim
    return torch.bfloat16.itemsize * (4 * shape.tokens * shape.dim + (used + shape.experts) * weights)


def split(layer: Layer, inputs: tuple) -> dict:
    """The quantizers' share of a step's device time, of operators' host time on a CPU, and the longest kernels."""
    kernels = kernels_of(lambda: layer.step(*inputs), inputs[0].device)
    quantizing, total = sum(k.us for k in kernels if k.kind == "quantize"), sum(k.us for k in kernels) or 1.0
    return {"quantize %": 100 * quantizing / total, "kernels": longest(kernels)}


def work_of(shape: Experts, routing: str, device: torch.device) -> Work:
    """The MLP of these experts, with the same weights for every recipe."""
    ends = group_ends(routing, shape.tokens, shape.experts, device)

    def inputs():
        x, dy = (torch.randn(shape.tokens, shape.dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        return x.requires_grad_(), dy

    return Work(
        {"shape": str(shape), "routing": routing},
        lambda recipe: make_layer(shape, recipe, ends),
        inputs,
        floor_bytes(shape, ends),
        18 * shape.tokens * shape.hidden * shape.dim,
        _BUDGETS,
        split,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = layers.parser(__doc__, shapes.MIXTURES, RECIPES, DEFAULT_RECIPES)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default all")
    args, device = driver.parse(parser, argv)
    works = [work_of(shape, routing, device) for shape in args.shapes for routing in args.routings]
    return layers.run("moe", COLUMNS, args, works, device)


if __name__ == "__main__":
    sys.exit(main())
