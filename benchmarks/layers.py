"""What benchmarks of layers share: a layer that trains, its step checked against bf16's, its time and its memory.

roofline x   how many times faster than bf16 a step could be: its operations at the peak of bf16, over the same at the
             peak of fp8 and the bytes of quantization; peaks of the data sheet (spec), or as measured in this run
reached      the share of that which the row is faster than bf16
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import driver
import energy
import peers
import roofline
import torch
from driver import ratios
from errors import check as within
from errors import relative_error
from report import Report
from step_memory import step_memory
from timing import Timing, host_time, input_sets, time_eager, time_runs
from torch import nn

from torchao_blockwise.formats import FP8_1X128, FP8_128X128

OURS = tuple(peers.OUR_CONFIGS)
COLUMNS = (
    *("recipe", "graph us", "eager us", "host us", "TFLOP/s", "roofline us", "of roofline"),
    *("memory MiB", "error"),
    *(f"{what} ({by})" for by in ("spec", "measured") for what in ("roofline x", "reached")),
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


def stages(recipes: Sequence[str]) -> list[list[str]]:
    """`recipes` in the order in which they are measured, each stage at every shape before the next one begins.

    First ours and bf16, then what tunes its kernels for each shape, then what compiles the layer: a run that is cut
    short has the rows that matter.
    """
    compiled = [recipe for recipe in recipes if recipe in peers.COMPILED]
    first = [recipe for recipe in recipes if recipe in (*OURS, "bf16")]
    tuned = [recipe for recipe in recipes if recipe not in (*first, *compiled)]
    return [stage for stage in (first, *([recipe] for recipe in (*tuned, *compiled))) if stage]


def parser(doc: str, recipes: Sequence[str], default: Sequence[str]) -> argparse.ArgumentParser:
    """The options of benchmarks of layers but for their shapes."""
    made = driver.parser(doc, only=(recipes, default))
    made.add_argument(
        "--seconds", type=float,
        help="that each time of a row is measured for; default 0.05 for graphs, 50 eager and 200 launched steps",
    )  # fmt: skip
    driver.add_energy(made)
    return made


class Work(NamedTuple):
    """What the recipes of a benchmark are measured on.

    labels: what the rows' first columns say. make: recipe -> a new layer; may raise.
    inputs: () -> fresh (x, dy). nbytes: that must move in a step. flops: of a step.
    budgets: recipe -> ‖difference to bf16‖ / ‖bf16‖ that it may have. quantized_bytes: as of the function of that name.
    more: (layer, inputs) -> further columns.
    """

    labels: Mapping[str, str]
    make: Callable[[str], Layer]
    inputs: Callable[[], tuple]
    nbytes: int
    flops: int
    budgets: Mapping[str, float]
    quantized_bytes: Mapping[str, int]
    more: Callable[[Layer, tuple], dict] = lambda layer, inputs: {}

    @property
    def where(self) -> str:
        return " | ".join(self.labels.values())


def quantized_bytes(tokens: int, weight: tuple[int, ...]) -> dict[str, int]:
    """{recipe: bytes that a step's quantization moves}, for recipes of 1x128 and 128x128 blocks.

    weight: [.., N, K] in bf16. x and dy are read once and both copies written; the weight is read for each of its two
    copies, in high precision or, where the Parameter is in FP8, as that, whose rowwise copy is there.
    """
    *_, n, k = weight
    activations = sum(
        torch.bfloat16.itemsize * tokens * width + FP8_1X128.nbytes(tokens, width) + FP8_1X128.nbytes(width, tokens)
        for width in (n, k)
    )
    high, low = torch.bfloat16.itemsize * math.prod(weight), FP8_128X128.nbytes(*weight)
    both = activations + 2 * (high + low)
    return {"fp8": both, "torchao": both, "fp8_primary": activations + 2 * low}


def reached(work: Work, recipe: str, speedup: float, results: Report) -> dict[str, float]:
    """Columns of the speed-up over bf16 that there could be, and the share of it that `speedup` is."""
    if recipe not in work.quantized_bytes:
        return {}
    columns = {}
    for by, ceilings in (("spec", roofline.specification(results.device_name)), ("measured", results.ceilings)):
        if ceilings is not None:
            possible = ceilings.speedup(work.flops, work.quantized_bytes[recipe])
            columns |= {f"roofline x ({by})": possible, f"reached ({by})": speedup / possible}
    return columns


def run(name: str, columns: Sequence[str], args: argparse.Namespace, works: Sequence[Work], title: str, device) -> int:
    """Measure every recipe at every work, stage by stage, and write the results."""
    columns = [*columns, *(f"x {recipe}" for recipe in args.only if recipe not in OURS)]
    results = Report(name, device, columns, vars(args))
    results.measure_ceilings()
    todo = (
        (stage, work.where, functools.partial(measure, work, stage, results, args.seconds))
        for stage in stages(args.only)
        for work in works
    )

    def picture(results: Report) -> dict:
        subtitle = "operations of the products over time, random data"
        return roofline.picture(
            results, f"{title}, forward and backward", "recipe", ours=OURS.__contains__, subtitle=subtitle
        )

    return driver.run(results, todo, picture)


def measure(work: Work, recipes: Sequence[str], results: Report, seconds: float | None = None) -> None:
    """Check and time the step of every recipe of a stage, and add a row for each.

    Ours whose rows are there already run once more beside the others, whose ratios are then added to those rows:
    graphs take turns, so that a ratio is of the same heat and clocks.

    seconds: that each time is measured for, see `parser`.
    """
    device, where = results.device, work.where
    sets = input_sets(work.inputs, device, 2 * work.nbytes)
    there = {row["recipe"]: row for row in results.rows if row["where"] == where}
    again = [recipe for recipe in there if recipe in OURS]
    expected = work.make("bf16").step(*sets[0])
    layers: dict[str, Layer] = {}
    errors: dict[str, float] = {}

    def check(recipe: str, expected: Sequence[torch.Tensor]) -> None:
        layer = work.make(recipe)
        got = layer.step(*sets[0])
        errors[recipe] = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
        within(errors[recipe], work.budgets[recipe])
        layers[recipe] = layer

    for recipe in (*again, *recipes):
        results.attempt(recipe, where, check, recipe, expected)
    del expected
    # Together, for the same clocks; the rest one by one, so that only one layer's gradients live.
    runs = {recipe: (layer.step, sets) for recipe, layer in layers.items()}
    options = {} if seconds is None else {"seconds": seconds}
    graphs = time_runs(runs, device, with_energy=results.with_energy, **options)
    new: dict[str, dict] = {}
    ours = {recipe: row["us"] for recipe, row in there.items()}
    for recipe, layer in layers.items():
        graph = graphs[recipe]
        captured = graph if isinstance(graph, Timing) and graph.captured else None
        if recipe in again:
            if captured:
                ours[recipe] = min(there[recipe]["eager us"], captured.us)
            continue
        if captured is None:
            results.leave_out(f"{recipe}, graph", where, graph if isinstance(graph, str) else "was not captured")
        row = results.attempt(recipe, where, _row, recipe, layer, work, captured, sets[0], results, seconds)
        if row is not None:
            new[recipe] = row | {"where": where, "error": errors[recipe]}
    times = {recipe: row["us"] for recipe, row in new.items()}
    for recipe, row in new.items():
        others = {name: us for name, us in times.items() if name != recipe}
        last = next((other for other in reversed(results.rows) if other["where"] == where), None)
        row = {**work.labels, **row} | (ratios(row["us"], others) if recipe in OURS else {})
        base = times.get("bf16") or there.get("bf16", {}).get("us")
        results.add(row | (reached(work, recipe, base / row["us"], results) if base else {}), after=last)
    for recipe in again if new else ():
        results.amend(there[recipe], ratios(ours[recipe], times))


def _few_enough(
    run: Callable[[], object], device: torch.device, calls: int, repeats: int, seconds: float | None
) -> dict:
    """Calls and repeats of a loop of `run`: these, or as many as fit in `seconds`, at least one call three times."""
    if seconds is None:
        return {"calls": calls, "repeats": repeats}
    us = time_eager(run, device, calls=1, repeats=1).us
    fit = max(3, int(seconds * 1e6 / us))
    calls = max(1, min(calls, fit // 3))
    return {"calls": calls, "repeats": max(3, min(repeats, fit // calls))}


def _row(
    recipe: str, layer: Layer, work: Work, graph: Timing | None, inputs: tuple, results: Report, seconds: float | None
) -> dict:
    """What was measured of one recipe."""

    def step():
        layer.step(*inputs)

    device = results.device
    eager = time_eager(step, device, **_few_enough(step, device, 10, 5, seconds))
    host = host_time(step, device, **_few_enough(step, device, 10, 20, seconds))
    memory = step_memory(functools.partial(work.make, recipe), *inputs)
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
        "intensity": work.flops / work.nbytes,
        "timing": {"graph": graph._asdict() if graph else None, "eager": eager._asdict(), "host": host._asdict()},
        **work.more(layer, inputs),
        **({"J": graph.joules if graph else energy.joules(step, device)} if results.with_energy else {}),
    }
