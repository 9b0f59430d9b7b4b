"""A linear layer, forward and backward: time, memory and host time, ours beside bf16 and torchao's recipes.

For each shape and recipe, with bf16 weights, an input that needs its gradient, and a weight quantised once a step:
    graph    a step replayed from a CUDA graph, cold cache; ours quantises the weight for each product there
    eager    a step in a loop of eager steps, the weight changed before each: host and device as in training
    host     until an eager step has been launched
    TFLOP/s  6 · tokens · N · K over the shorter of graph and eager
    memory   peak above the start of a step, which holds the gradients of the last one and frees them first
Checks first that output and gradients are those of bf16 within FP8's error. Floor: three products at the rate of
cuBLASLt's tensorwise fp8, or the bytes of x, w, dy read once and y, dx, dw written once.
Writes benchmarks/results/linear_<device>.json, .md and .png.

    python benchmarks/bench_linear.py [--shapes 4096x18432x7168] [--only fp8 bf16 torchao]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import peers
import report
import torch
from report import Report
from roofline import Series
from shapes import Shape
from torch import nn

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.testing import relative_error
from torchao_blockwise.tuning import Timing, host_time, input_sets, time_eager, time_runs
from torchao_blockwise.tuning.timing import reason, synchronize

OURS = ("fp8", "nvfp4")
RECIPES = ("fp8", "bf16", "torchao", "torchao_tensorwise", "torchao_rowwise", "nvfp4")
DEFAULT_RECIPES = RECIPES[:-1]
COLUMNS = (
    *("shape", "recipe", "graph us", "eager us", "host us", "TFLOP/s", "roofline us", "of roofline"),
    *("memory MiB", "error"),
)
# ‖difference to bf16‖ / ‖bf16‖ that a recipe may have: three times what rounding to its elements gives.
_BUDGET = {"nvfp4": 0.4}
_FP8_BUDGET = 0.1


class Layer:
    """A layer that trains by `recipe`, and one step of it."""

    def __init__(self, shape: Shape, recipe: str, weight: torch.Tensor, device: torch.device):
        linear = nn.Linear(shape.in_features, shape.out_features, bias=False, device=device, dtype=weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight)
        # In a container, because torchao replaces the module that it converts.
        self.model = peers.convert(nn.Sequential(linear), recipe, device)
        self.call = peers.compile_model(self.model, device) if recipe in peers.COMPILED else self.model
        (self.weight,) = self.model.parameters()

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(y, dx, dw)."""
        y = self.call(x)
        return y.detach(), *torch.autograd.grad(y, (x, self.weight), dy)

    def change_weight(self) -> None:
        """As an optimizer would, for what is kept of the weight; costs no launch."""
        hp = self.weight.detach()
        torch.autograd.graph.increment_version(hp.hp if isinstance(hp, MasterWeightTensor) else hp)


def peak_memory(layer: Layer, x: torch.Tensor, dy: torch.Tensor) -> int | None:
    """Bytes that a step takes above its start, at the end of which the gradients of the last step still exist."""
    if x.device.type != "cuda":
        return None

    def step():
        x.grad = layer.weight.grad = None
        layer.change_weight()
        layer.call(x).backward(dy)

    for _ in range(2):
        step()
    synchronize(x.device)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    step()
    synchronize(x.device)
    peak = torch.cuda.max_memory_allocated() - start
    x.grad = layer.weight.grad = None
    return peak


def floor_bytes(shape: Shape) -> int:
    """x, w and dy read, y, dx and dw written, in bf16."""
    t, n, k = shape
    return 2 * torch.bfloat16.itemsize * (t * n + t * k + n * k)


def measure(shape: Shape, recipes: Sequence[str], results: Report) -> None:
    """Check and time every recipe at this shape, and add a row for each."""
    device = results.device
    t, n, k = shape
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5

    def make():
        x, dy = (torch.randn(t, width, device=device, dtype=torch.bfloat16) for width in (k, n))
        return x.requires_grad_(), dy

    sets = input_sets(make, device, 2 * floor_bytes(shape))
    expected = Layer(shape, "bf16", weight, device).step(*sets[0])
    layers: dict[str, Layer] = {}
    errors: dict[str, float] = {}
    for recipe in recipes:
        try:
            layer = Layer(shape, recipe, weight, device)
            errors[recipe] = max(relative_error(a, b) for a, b in zip(layer.step(*sets[0]), expected))
        except peers.Unavailable as why:
            results.leave_out(recipe, str(shape), str(why))
        except Exception as error:
            results.leave_out(recipe, str(shape), reason(error))
        else:
            if errors[recipe] > _BUDGET.get(recipe, _FP8_BUDGET):
                results.leave_out(recipe, str(shape), f"WRONG, relative error {errors[recipe]:.2g}")
            else:
                layers[recipe] = layer
    del expected
    # Together, for the same clocks; the rest one by one, so that only one layer's gradients live.
    graphs = time_runs({recipe: (layer.step, sets) for recipe, layer in layers.items()}, device)
    rows = {}
    for recipe, layer in layers.items():
        graph = graphs[recipe]
        if isinstance(graph, str) or not graph.captured:
            results.leave_out(f"{recipe}, graph", str(shape), graph if isinstance(graph, str) else "was not captured")
            graph = None
        try:
            rows[recipe] = row_of(shape, recipe, layer, graph, sets[0], results) | {"error": errors[recipe]}
        except Exception as error:
            results.leave_out(recipe, str(shape), reason(error))
    for recipe, row in rows.items():
        others = {name: other["us"] for name, other in rows.items() if name != recipe}
        results.add(row | (report.ratios(row["us"], others) if recipe in OURS else {}))


def row_of(shape: Shape, recipe: str, layer: Layer, graph: Timing | None, inputs: tuple, results: Report) -> dict:
    """What was measured of one recipe."""

    def step():
        layer.change_weight()
        layer.step(*inputs)

    eager, host = time_eager(step, results.device), host_time(step, results.device)
    memory = peak_memory(layer, *inputs)
    us = min(eager.us, graph.us) if graph else eager.us
    flops = 6 * shape.tokens * shape.out_features * shape.in_features
    floor = results.ceilings.floor_us(floor_bytes(shape), flops, "bf16" if recipe == "bf16" else "fp8")
    return {
        "shape": str(shape),
        "recipe": recipe,
        "graph us": graph.us if graph else None,
        "eager us": eager.us,
        "host us": host.us,
        "TFLOP/s": flops / us / 1e6,
        "roofline us": floor,
        "of roofline": floor / us,
        "memory MiB": None if memory is None else memory / 2**20,
        "us": us,
        "intensity": flops / floor_bytes(shape),
        "timing": {"graph": graph._asdict() if graph else None, "eager": eager._asdict(), "host": host._asdict()},
    }


def picture(results: Report) -> dict:
    """TFLOP/s over operations a byte."""
    names = list(dict.fromkeys(row["recipe"] for row in results.rows))
    c = results.ceilings
    return {
        "title": "A linear layer, forward and backward",
        "subtitle": f"{results.device_name} · 6 · tokens · N · K over time, random data",
        "series": [
            Series(n, [(r["intensity"], r["TFLOP/s"]) for r in results.rows if r["recipe"] == n], n in OURS)
            for n in names
        ],
        "roofs": {"fp8 tensorwise, cuBLASLt": (c.copy, c.fp8), "bf16": (c.copy, c.bf16)},
        "labels": ("operations a byte of x, w, dy, y, dx and dw", "TFLOP/s"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.arguments(__doc__, "linear", cases=RECIPES)
    parser.set_defaults(only=list(DEFAULT_RECIPES))
    args, device = report.parse(parser, argv)
    columns = [*COLUMNS, *(f"x {name}" for name in args.only if name not in OURS)]
    results = Report("linear", device, columns, report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    for shape in args.shapes:
        try:
            measure(shape, args.only, results)
        except Exception as error:
            results.leave_out("all", str(shape), reason(error))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.write(args.out, picture(results))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
