"""Shared by benchmarks of layers: a layer that trains, its step checked against bf16's, its time and its memory.

roofline x   how many times faster than bf16 a step could be: its operations at the peak of bf16, over the same at the
             peak of fp8 and the bytes of quantization; peaks as measured in this run
reached      the share of that by which the row is faster than bf16
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from common import driver, peers
from common.errors import check as within
from common.errors import relative_error
from common.report import Report
from common.timing import Timing, host_time, input_sets, time_eager, time_runs
from torchao_blockwise.formats import FP8_1X128, FP8_128X128

OURS = tuple(peers.OUR_CONFIGS)
COLUMNS = (
    *("recipe", "graph us", "eager us", "host us", "TFLOP/s", "roofline us", "of roofline"),
    *("memory MiB", "error", "roofline x (measured)", "reached (measured)"),
)


class Layer:
    """A layer that trains, and one step of it.

    call: x -> y by `model`, whose Parameters all get a gradient.
    """

    def __init__(self, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]):
        self.model, self.call = model, call
        self.weights = list(model.parameters())

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(y, dx, the weights' gradients)."""
        y = self.call(x)
        return y.detach(), *torch.autograd.grad(y, (x, *self.weights), dy)


def parser(
    doc: str, shapes: Mapping[str, list], recipes: Sequence[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """The options of benchmarks of layers."""
    made = driver.parser(doc, (shapes, "large"), only=(recipes, default))
    made.add_argument(
        "--seconds", type=float,
        help="that each time of a row is measured for; default 0.05 for graphs, 50 eager and 200 launched steps",
    )  # fmt: skip
    return made


class Work(NamedTuple):
    """The work that the recipes of a benchmark are measured on.

    labels: what the rows' first columns say. make: recipe -> a new layer; may raise.
    inputs: () -> fresh (x, dy). nbytes: that must move in a step. flops: of a step.
    budgets: recipe -> ‖difference to bf16‖ / ‖bf16‖ that it may have. more: (layer, inputs) -> further columns.
    quantized_bytes: as of the function of that name.
    """

    labels: Mapping[str, str]
    make: Callable[[str], Layer]
    inputs: Callable[[], tuple]
    nbytes: int
    flops: int
    budgets: Mapping[str, float]
    more: Callable[[Layer, tuple], dict] = lambda layer, inputs: {}
    quantized_bytes: Mapping[str, int] = {}

    @property
    def where(self) -> str:
        return " | ".join(self.labels.values())


class StepMemory(NamedTuple):
    """Bytes of a layer and of its step, without the step's inputs and what others have allocated.

    weights: of the layer between steps.
    gradients: of the weights and of x, after backward.
    held: between forward and backward, without weights; y is held by the caller.
    step: at its peak, with everything above. What the layer saves of x is x itself in high precision, which counts as
        an input here.
    step_owning_x: the peak of a step that makes x, so that x lives as long as the layer needs it: what a model holds
        whose next layer needs no x.
    """

    weights: int
    gradients: int
    held: int
    step: int
    step_owning_x: int


def step_memory(make: Callable, x: torch.Tensor, dy: torch.Tensor) -> StepMemory | None:
    """The memory of a step of the layer that `make` gives; None on devices without PyTorch's allocator.

    make: () -> a new Layer; only this one is counted. x, dy: inputs that exist, x with requires_grad. What runs once,
    as libraries' workspaces do, should have run before.
    """
    if x.device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated
    gc.collect()
    base = allocated()
    layer = make()

    def forget():
        for t in (x, *layer.weights):
            t.grad = None

    def step(own_x: bool = False) -> int:
        """Bytes between forward and backward; gradients of the step before are freed first."""
        forget()
        y = layer.call(x.clone() if own_x else x)
        held = allocated()
        y.backward(dy)
        return held

    def peak(own_x: bool) -> int:
        forget()
        torch.cuda.reset_peak_memory_stats()
        step(own_x)
        return torch.cuda.max_memory_allocated() - base

    for _ in range(2):
        # A weight that is quantized itself has its values until a GEMM has used it.
        step()
    after = allocated()
    forget()
    resident = allocated()
    held = step() - resident
    peaks = peak(False), peak(True)
    forget()
    return StepMemory(resident - base, after - resident, held, *peaks)


def quantized_bytes(tokens: int, weight: tuple[int, ...]) -> dict[str, int]:
    """{recipe: bytes that a step's quantization moves}, for recipes of 1x128 and 128x128 blocks.

    weight: [.., N, K] in bf16. x and dy are read once and both copies written; the weight is read for each of its two
    copies, or once for both ("saved"), in high precision or, where the Parameter is in FP8, as that, whose rowwise
    copy is there.
    """
    *_, n, k = weight
    activations = sum(
        torch.bfloat16.itemsize * tokens * width + FP8_1X128.nbytes(tokens, width) + FP8_1X128.nbytes(width, tokens)
        for width in (n, k)
    )
    high, low = torch.bfloat16.itemsize * math.prod(weight), FP8_128X128.nbytes(*weight)
    both = dict.fromkeys(("fp8", "fp8_128x128", "torchao"), activations + 2 * (high + low))
    saved = dict.fromkeys(("fp8_saved", "fp8_128x128_saved"), activations + high + 2 * low)
    return both | saved | {"fp8_primary": activations + 2 * low}


def reached(work: Work, recipe: str, speedup: float, results: Report) -> dict[str, float]:
    """Columns of the speed-up over bf16 that is possible, and the share of it that `speedup` is."""
    if recipe not in work.quantized_bytes:
        return {}
    possible = results.ceilings.speedup(work.flops, work.quantized_bytes[recipe])
    return {"roofline x (measured)": possible, "reached (measured)": speedup / possible}


def run(name: str, columns: Sequence[str], args: argparse.Namespace, works: Sequence[Work], device) -> int:
    """Measure every recipe at every work, and write the results."""
    columns = [*columns, *(f"x {recipe}" for recipe in args.only if recipe not in OURS)]
    results = Report(name, device, columns, vars(args))
    results.measure_ceilings()
    todo = (("all", work.where, partial(measure, work, args.only, results, args.seconds)) for work in works)
    return driver.run(results, todo)


def measure(work: Work, recipes: Sequence[str], results: Report, seconds: float | None = None) -> None:
    """Check and time the step of every recipe, and add a row for each; seconds: that each time is measured for."""
    device, where = results.device, work.where
    sets = input_sets(work.inputs, device, 2 * work.nbytes)
    expected = work.make("bf16").step(*sets[0])
    layers: dict[str, Layer] = {}
    errors: dict[str, float] = {}

    def check(recipe: str, expected: Sequence[torch.Tensor]) -> None:
        layer = work.make(recipe)
        got = layer.step(*sets[0])
        errors[recipe] = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
        within(errors[recipe], work.budgets[recipe])
        layers[recipe] = layer

    for recipe in recipes:
        results.attempt(recipe, where, check, recipe, expected)
    del expected
    # Together, for the same clocks; the rest one by one, so that only one layer's gradients live.
    runs = {recipe: (layer.step, sets) for recipe, layer in layers.items()}
    options = {} if seconds is None else {"seconds": seconds}
    graphs = time_runs(runs, device, **options)
    rows: dict[str, dict] = {}
    for recipe, layer in layers.items():
        graph = graphs[recipe]
        if isinstance(graph, str):
            results.leave_out(f"{recipe}, graph", where, graph)
            graph = None
        row = results.attempt(recipe, where, _row, recipe, layer, work, graph, sets[0], results, seconds)
        if row is not None:
            rows[recipe] = row | {"where": where, "error": errors[recipe]}
    times = {recipe: row["us"] for recipe, row in rows.items()}
    for recipe, row in rows.items():
        others = {name: us for name, us in times.items() if name != recipe} if recipe in OURS else {}
        more = reached(work, recipe, times["bf16"] / row["us"], results) if "bf16" in times else {}
        results.add(work.labels | row | driver.ratios(row["us"], others) | more)


def _row(
    recipe: str, layer: Layer, work: Work, graph: Timing | None, inputs: tuple, results: Report, seconds: float | None
) -> dict:
    """The row of one recipe."""

    def step():
        layer.step(*inputs)

    device = results.device
    eager, host = time_eager(step, device, seconds), host_time(step, device, seconds)
    memory = step_memory(partial(work.make, recipe), *inputs)
    us = min(eager.us, graph.us) if graph else eager.us
    floor = results.ceilings.floor_us(work.nbytes, work.flops, "bf16" if recipe.startswith("bf16") else "fp8")
    return {
        "recipe": recipe,
        "graph us": graph.us if graph else None,
        "eager us": eager.us,
        "host us": host.us,
        "TFLOP/s": work.flops / us / 1e6,
        "roofline us": floor,
        "of roofline": floor / us,
        "memory MiB": None if memory is None else memory.step / 2**20,
        # Bytes.
        "memory": None if memory is None else memory._asdict(),
        "us": us,
        "timing": {"graph": graph._asdict() if graph else None, "eager": eager._asdict(), "host": host._asdict()},
        **work.more(layer, inputs),
    }
