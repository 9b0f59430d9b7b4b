"""What benchmarks of layers share: a layer that trains, its step checked against bf16's, its time and its memory."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence

import peers
import report
import torch
from errors import relative_error
from report import Report
from roofline import Series
from step_memory import step_memory
from timing import Timing, host_time, reason, time_eager, time_runs
from torch import nn

OURS = tuple(peers.OUR_CONFIGS)
COLUMNS = (
    *("recipe", "graph us", "eager us", "host us", "TFLOP/s", "roofline us", "of roofline"),
    *("memory MiB", "error"),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `measure`."""
    parser.add_argument(
        "--seconds", type=float,
        help="that each time of a row is measured for; default 0.05 for graphs, 50 eager and 200 launched steps",
    )  # fmt: skip


def measure(
    where: str,
    recipes: Sequence[str],
    make: Callable[[str], Layer],
    sets: Sequence[tuple],
    work: tuple[int, int],
    budgets: Mapping[str, float],
    results: Report,
    more: Callable[[Layer, tuple], dict] | None = None,
    seconds: float | None = None,
) -> None:
    """Check and time the step of every recipe of a stage, and add a row for each.

    Ours whose rows are there already run once more beside the others, whose ratios are then added to those rows:
    graphs take turns, so that a ratio is of the same heat and clocks.

    where: what the rows' first columns say, with " | " between them. make: recipe -> a new layer; may raise.
    sets: (x, dy) of as many steps as it takes for a cold cache. work: (bytes that must move, operations) of a step.
    budgets: recipe -> ‖difference to bf16‖ / ‖bf16‖ that it may have. more: (layer, inputs) -> further columns.
    seconds: that each time is measured for, see `add_arguments`.
    """
    device = results.device
    there = {row["recipe"]: row for row in results.rows if row["where"] == where}
    again = [recipe for recipe in there if recipe in OURS]
    expected = make("bf16").step(*sets[0])
    layers: dict[str, Layer] = {}
    errors: dict[str, float] = {}
    for recipe in (*again, *recipes):
        try:
            layer = make(recipe)
            errors[recipe] = max(relative_error(a, b) for a, b in zip(layer.step(*sets[0]), expected, strict=True))
        except peers.Unavailable as why:
            results.leave_out(recipe, where, str(why))
        except Exception as error:
            results.leave_out(recipe, where, reason(error))
        else:
            if not errors[recipe] <= budgets[recipe]:
                results.leave_out(recipe, where, f"WRONG, relative error {errors[recipe]:.2g}")
            else:
                layers[recipe] = layer
    del expected
    # Together, for the same clocks; the rest one by one, so that only one layer's gradients live.
    runs = {recipe: (layer.step, sets) for recipe, layer in layers.items()}
    graphs = time_runs(runs, device, **({} if seconds is None else {"seconds": seconds}))
    new: dict[str, dict] = {}
    ours: dict[str, float] = {}
    for recipe, layer in layers.items():
        graph = graphs[recipe]
        if recipe in again:
            if isinstance(graph, Timing) and graph.captured:
                ours[recipe] = min(there[recipe]["eager us"], graph.us)
            continue
        if isinstance(graph, str) or not graph.captured:
            results.leave_out(f"{recipe}, graph", where, graph if isinstance(graph, str) else "was not captured")
            graph = None
        try:
            again_made = functools.partial(make, recipe)
            row = _row(recipe, layer, again_made, graph, sets[0], work, results, seconds) | {
                "where": where,
                "error": errors[recipe],
            }
            new[recipe] = row | (more(layer, sets[0]) if more is not None else {})
        except Exception as error:
            results.leave_out(recipe, where, reason(error))
    times = {recipe: row["us"] for recipe, row in new.items()}
    for recipe, row in new.items():
        others = {name: us for name, us in times.items() if name != recipe}
        places = dict(zip(results.columns, where.split(" | ")))
        last = next((other for other in reversed(results.rows) if other["where"] == where), None)
        results.add(places | row | (report.ratios(row["us"], others) if recipe in OURS else {}), after=last)
    for recipe in again if new else ():
        results.amend(there[recipe], report.ratios(ours.get(recipe, there[recipe]["us"]), times))


def picture(results: Report, title: str, work: str, tensors: str) -> dict:
    """TFLOP/s over operations a byte, a series a recipe. work: what is counted over time; tensors: whose bytes."""
    names = list(dict.fromkeys(row["recipe"] for row in results.rows))
    c = results.ceilings
    return {
        "title": f"{title}, forward and backward",
        "subtitle": f"{results.device_name} · {work} over time, random data",
        "series": [
            Series(n, [(r["intensity"], r["TFLOP/s"]) for r in results.rows if r["recipe"] == n], n in OURS)
            for n in names
        ],
        "roofs": {"fp8 tensorwise, cuBLASLt": (c.copy, c.fp8), "bf16": (c.copy, c.bf16)},
        "labels": (f"operations a byte of {tensors}", "TFLOP/s"),
    }


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
    recipe: str,
    layer: Layer,
    make: Callable[[], Layer],
    graph: Timing | None,
    inputs: tuple,
    work: tuple[int, int],
    results: Report,
    seconds: float | None,
) -> dict:
    """What was measured of one recipe."""

    def step():
        layer.step(*inputs)

    device = results.device
    eager = time_eager(step, device, **_few_enough(step, device, 10, 5, seconds))
    host = host_time(step, device, **_few_enough(step, device, 10, 20, seconds))
    memory = step_memory(make, *inputs)
    us = min(eager.us, graph.us) if graph else eager.us
    nbytes, flops = work
    floor = results.ceilings.floor_us(nbytes, flops, "bf16" if recipe.startswith("bf16") else "fp8")
    return {
        "recipe": recipe,
        "graph us": graph.us if graph else None,
        "eager us": eager.us,
        "host us": host.us,
        "TFLOP/s": flops / us / 1e6,
        "roofline us": floor,
        "of roofline": floor / us,
        "memory MiB": None if memory is None else memory.step / 2**20,
        # Bytes.
        "memory": None if memory is None else memory._asdict(),
        "us": us,
        "intensity": flops / nbytes,
        "timing": {"graph": graph._asdict() if graph else None, "eager": eager._asdict(), "host": host._asdict()},
    }
