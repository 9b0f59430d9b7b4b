"""Steady-state speed of all recipes in one process, which take turns: tokens/s, time, host time, memory, kernels."""

from __future__ import annotations

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from common import kernel_times
from common.report import Report
from common.timing import Timing, synchronize

from llm_training import products
from llm_training.config import RunConfig
from llm_training.data import Corpus
from llm_training.training import Trainer

COLUMNS = (
    *("recipe", "tokens/s", "x bf16", "ms a step", "spread %", "host ms", "peak GiB"),
    *kernel_times.GROUP_COLUMNS,
)
# Each model's steps before those that are timed, the last of which gives the memory; steps in a turn; steps for the
# host's time and for the kernels'.
_WARM_UP, _TURN, _LOOKED_AT = 3, 5, 3


class Run:
    """A model that trains by `recipe`, all of its steps on batches that are on the device already.

    Raises what conversion and the first steps raise. peak: bytes that it and its step have allocated; None on a CPU.
    """

    def __init__(self, recipe: str, config: RunConfig, batches: Sequence[torch.Tensor]):
        self.batches, self.steps, self.device = batches, 0, batches[0].device
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        self.trainer = Trainer(recipe, config, self.device)
        for _ in range(_WARM_UP):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
            self.step()
        self.peak = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else None
        self.samples: list[float] = []

    def step(self, part=contextlib.nullcontext) -> None:
        # Of a schedule that never ends.
        at = self.steps % self.trainer.config.steps
        self.trainer.step(self.batches[self.steps % len(self.batches)], at, part)
        self.steps += 1

    def turn(self, steps: int) -> None:
        """Time `steps` steps without a pause, including the device's work."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        self.samples.append((time.perf_counter() - start) * 1e6 / steps)

    def host_us(self) -> float:
        """Time a step until its work has been launched, while the device is never behind by more than a pass."""
        samples = []

        @contextlib.contextmanager
        def part() -> Iterator[None]:
            synchronize(self.device)
            start = time.perf_counter()
            yield
            samples[-1] += (time.perf_counter() - start) * 1e6

        for _ in range(_LOOKED_AT):
            samples.append(0.0)
            self.step(part)
        return statistics.median(samples)


def measure(recipes: Sequence[str], config: RunConfig, corpus: Corpus, args: Namespace, name: str, device) -> int:
    """Time all recipes, turn by turn, and write the results, without those that fail; 0 where there are any."""
    results = Report(name, device, COLUMNS, vars(args) | asdict(config))
    sequences = config.batch_size * config.grad_accumulation
    batches = [corpus.batch(config.seed, i, sequences).to(device) for i in range(_TURN)]
    # Each recipe's blocks are a variant of the same code, and all of them stay compiled.
    with torch._dynamo.config.patch(recompile_limit=64), products.computed_in(config.products):
        runs = {r: results.attempt(r, config.preset, Run, r, config, batches) for r in recipes}
        runs = {recipe: run for recipe, run in runs.items() if run is not None}
        for _ in range(max(1, config.steps // _TURN)):
            for run in runs.values():
                run.turn(min(_TURN, config.steps))
        # bf16 first: the others are compared with it.
        for recipe, run in sorted(runs.items(), key=lambda item: item[0] != "bf16"):
            results.attempt(recipe, config.preset, _add_row, recipe, run, args.profile, results)
    results.write(args.out)
    return 0 if results.rows else 1


def _add_row(recipe: str, run: Run, profile: bool, results: Report) -> None:
    timing = Timing.of(run.samples)
    base = next((r for r in results.rows if r["recipe"] == "bf16"), None)
    row = {
        "recipe": recipe,
        "tokens/s": run.trainer.config.tokens_per_step / timing.us * 1e6,
        "ms a step": timing.us / 1e3,
        "x bf16": base["us"] / timing.us if base else None,
        "host ms": run.host_us() / 1e3,
        "peak GiB": None if run.peak is None else run.peak / 2**30,
        "layers": run.trainer.result.layers,
        **timing.columns(),
    }
    if profile:
        found = kernel_times.kernels_of(run.step, run.device, _LOOKED_AT)
        row |= kernel_times.group_ms(found) | {"kernels": kernel_times.longest(found)}
        results.sections.append(kernel_times.table(recipe, found, timing.us))
    results.add(row)
