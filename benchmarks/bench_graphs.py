"""Ways to launch a training step of a small model: eager, compiled, and replayed from CUDA graphs.

A stack of decoder layers of the 125m model's width, forward, backward and fused AdamW in bf16, on few tokens, so that
the host is what is waited for. The ways are those of docs/compile.md, "CUDA graphs". x eager: to the same recipe.

    python benchmarks/bench_graphs.py [--only bf16 fp8] [--ways eager whole_step] [--tokens 4096]
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from bench_model import SMOKE, Config, Trainer, build, time_steps
from common import driver, peers
from common.report import Report
from common.timing import on_side_stream

RECIPES = ("bf16", "fp8", "nvfp4")
SHAPE = Config(dim=768, hidden=2048, heads=12, kv_heads=12, layers=12, seq_len=1024)
COLUMNS = ("recipe", "way", "ms a step", "x bf16", "x eager", "spread %")


def eager(trainer: Trainer) -> None:
    """As it is."""


def compiled(trainer: Trainer) -> None:
    """Each layer by itself."""
    layers = trainer.model.layers
    for i, layer in enumerate(layers):
        layers[i] = peers.compile_model(layer, trainer.x.device)


def reduce_overhead(trainer: Trainer) -> None:
    """Compiled, with the compiler's own graphs."""
    trainer.model = torch.compile(trainer.model, mode="reduce-overhead", fullgraph=True)
    step = trainer.step

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step()

    trainer.step = marked


def graphed_callable(trainer: Trainer) -> None:
    """The model by `make_graphed_callables`; the optimizer runs eagerly."""
    trainer.model = torch.cuda.make_graphed_callables(trainer.model, (trainer.x.detach().clone().requires_grad_(),))


def forward_backward(trainer: Trainer) -> None:
    """Both in one graph; the optimizer runs eagerly."""
    graph = _captured(trainer, trainer.backward)

    def step() -> None:
        graph.replay()
        trainer.optimizer.step()

    trainer.step = step


def whole_step(trainer: Trainer) -> None:
    """With the optimizer in the graph."""
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        trainer.backward()
        trainer.optimizer.step()

    trainer.step = _captured(trainer, step).replay


def _captured(trainer: Trainer, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, after two runs on a separate stream; its gradients are in the graph's memory."""
    on_side_stream(run, trainer.x.device, 2)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


_ALL = (eager, compiled, reduce_overhead, graphed_callable, forward_backward, whole_step)
WAYS = {way.__name__: way for way in _ALL}
ON_A_CPU = ("eager", "compiled")


def measure(recipe: str, way: str, config: Config, args: Namespace, results: Report) -> None:
    torch._dynamo.reset()
    trainer = Trainer(build(config, recipe, results.device), config, args.tokens, results.device)
    WAYS[way](trainer)
    timing, _ = time_steps(trainer, results.device, args.steps)
    us = {(row["recipe"], row["way"]): row["us"] for row in results.rows} | {(recipe, way): timing.us}
    results.add(
        {
            "recipe": recipe,
            "way": way,
            "ms a step": timing.us / 1e3,
            "x bf16": us["bf16", way] / timing.us if ("bf16", way) in us else None,
            "x eager": us[recipe, "eager"] / timing.us if (recipe, "eager") in us else None,
            **timing.columns(),
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = driver.parser(__doc__, only=(RECIPES, RECIPES), ways=(tuple(WAYS), tuple(WAYS)))
    driver.add_numbers(options, tokens=4096, steps=20)
    args, device = driver.parse(options, argv)
    config = SHAPE
    if args.smoke:
        config, args.tokens, args.steps = replace(SMOKE, layers=1), SMOKE.seq_len, 2
    if device.type != "cuda":
        args.ways = [way for way in args.ways if way in ON_A_CPU]
    results = Report("graphs", device, COLUMNS, vars(args) | vars(config))
    work = (
        (recipe, way, partial(measure, recipe, way, config, args, results))
        for way, recipe in itertools.product(args.ways, sorted(args.only, key=RECIPES.index))
    )
    return driver.run(results, work)


if __name__ == "__main__":
    sys.exit(main())
