"""torchtitan's own trainer on one GPU or, by FSDP2, on several, by recipe: bf16, ours, and torchao's float8 rowwise.

Layers of Llama 3 8B, or of DeepSeek-V3 16B (the first one dense, the others with 64 experts), with embedding and head,
compiled, on made-up tokens that are the same for every recipe. Figures are the trainer's own, of its first rank:
tokens/s (of a GPU) and MFU are medians over its logs, without the first ones, in which it compiles; memory is the most
that it reserved. torchao's float8 quantizes linear layers, and experts stay in bf16. Each recipe runs in processes of
its own. Needs torchtitan 0.2.2.
Writes benchmarks/results/torchtitan_<model>_<layers>_layers_[<gpus>_gpus_]<device>.json and .md.

    python benchmarks/bench_torchtitan.py [--model deepseek --layers 4 --steps 300] [--recipes bf16 fp8] [--gpus 2]
    python benchmarks/bench_torchtitan.py -- --activation_checkpoint.mode selective     # options of torchtitan
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environment
import torch
from report import RESULTS, Report

COLUMNS = ("recipe", "model", "gpus", "tokens/s", "x bf16", "MFU %", "peak GiB", "first loss", "last loss")
# Of torchtitan, by recipe.
RECIPES = {
    "bf16": [],
    "fp8": ["--model.converters", "blockwise_fp8"],
    "fp8_fused": ["--model.converters", "blockwise_fp8", "--blockwise.options", '{"fuse": true}'],
    "nvfp4": ["--model.converters", "blockwise_nvfp4"],
    "torchao_rowwise": [
        *("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.recipe_name", "rowwise"),
        # What ours leave out.
        *("--quantize.linear.float8.filter_fqns", "output,router.gate"),
    ],
}
_RESULT = "RESULT "
# Logs in which a run compiles and warms up.
_WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """A model of torchtitan's, and how much of it a step sees."""

    name: str
    flavor: str
    seq_len: int
    sequences: int = 1


SHAPES = {"llama": Shape("llama3", "8B", 8192), "deepseek": Shape("deepseek_v3", "16B", 4096, 4)}
SMOKE = {
    "llama": Shape("llama3", "debugmodel", 32),
    "deepseek": Shape("deepseek_v3", "debugmodel", 32),
}


class Logs:
    """In the place of the trainer's logger: keeps what it is given."""

    def __init__(self):
        self.kept: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.kept.append(metrics)

    def close(self) -> None: ...


def train(shape: Shape, layers: int, recipe: str, steps: int, log_every: int, more: Sequence[str]) -> list[dict]:
    """The trainer's logs of `steps` steps of a model of `layers` layers."""
    import torchtitan.protocols.train_spec as specs
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    class Tokens(BaseDataLoader):
        """Those of a step depend on step and rank. Small numbers are frequent, so that there is something to learn."""

        def __init__(self, *, job_config, dp_world_size, dp_rank, **_):
            self.shape = job_config.training.local_batch_size, job_config.training.seq_len + 1
            self.ranks, self.rank = dp_world_size, dp_rank
            self.step = 0

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(self.step * self.ranks + self.rank)
                self.step += 1
                tokens = (torch.rand(self.shape, generator=generator) ** 4 * vocabulary).long()
                yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    spec = specs.get_train_spec(shape.name)
    sizes = dataclasses.replace(spec.model_args[shape.flavor], n_layers=layers)
    if getattr(sizes, "attn_type", "sdpa") != "sdpa":
        # A mask of documents ends them where a tokenizer says so, and there is none.
        sizes = dataclasses.replace(sizes, attn_type="sdpa", attn_mask_type="causal")
    vocabulary = sizes.vocab_size
    parts = {"build_tokenizer_fn": None, "build_dataloader_fn": Tokens, "build_validator_fn": None}
    spec = dataclasses.replace(spec, model_args={shape.flavor: sizes}, **parts)
    known, specs.get_train_spec = specs.get_train_spec, lambda name: spec
    arguments = ["--job.custom_config_module", "torchao_blockwise.integrations.torchtitan_0_2"]
    arguments += ["--model.name", shape.name, "--model.flavor", shape.flavor, *RECIPES[recipe]]
    arguments += ["--training.seq_len", str(shape.seq_len), "--training.local_batch_size", str(shape.sequences)]
    arguments += ["--training.steps", str(steps), "--lr_scheduler.warmup_steps", str(min(20, steps))]
    arguments += ["--metrics.log_freq", str(log_every), "--metrics.disable_color_printing", "--debug.seed", "1"]
    arguments += ["--activation_checkpoint.mode", "none", *more]
    logs = Logs()
    try:
        trainer = Trainer(ConfigManager().parse_args(arguments))
        trainer.metrics_processor.logger = logs
        trainer.train()
        trainer.close()
    finally:
        specs.get_train_spec = known
    return logs.kept


def figures(logs: list[dict]) -> dict[str, float]:
    """The row of a run. Its first step is logged too, and then every few."""
    timed = logs[_WARM_UP:]
    if not timed:
        raise ValueError(f"{len(logs)} logs, and {_WARM_UP} are for compiling; take more --steps")
    loss = "loss_metrics/global_avg_loss"
    return {
        "tokens/s": statistics.median(log["throughput(tps)"] for log in timed),
        "MFU %": statistics.median(log["mfu(%)"] for log in timed),
        "peak GiB": max(log["memory/max_reserved(GiB)"] for log in logs),
        "first loss": logs[0][loss],
        "last loss": logs[-1][loss],
    }


def measure(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """`figures` and the losses of a run in processes of its own, one a GPU."""
    ranks = {"WORLD_SIZE": str(args.gpus), "MASTER_ADDR": "localhost", "MASTER_PORT": str(environment.free_port())}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--run", recipe, "--model", args.model, "--layers", str(args.layers)]
    command += ["--steps", str(args.steps), *["--smoke"] * args.smoke, "--", *args.more]
    environments = [
        {**os.environ, **ranks, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path}
        for rank in range(args.gpus)
    ]
    others = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for env in environments[1:]]
    try:
        done = subprocess.run(command, env=environments[0], stdout=subprocess.PIPE, text=True)
    finally:
        for other in others:
            # A rank that fails leaves the others in a collective.
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(timeout=30)
            other.kill()
    found = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not found:
        raise RuntimeError(f"torchtitan ended with {done.returncode}; its log is above")
    return json.loads(found[-1].removeprefix(_RESULT))


def run_one(args: argparse.Namespace) -> None:
    """What a process that `measure` starts does."""
    shape = (SMOKE if args.smoke else SHAPES)[args.model]
    compiled = [] if args.smoke else ["--compile.enable"]
    logs = train(shape, args.layers, args.run, args.steps, max(1, args.steps // 30), [*compiled, *args.more])
    losses = [log["loss_metrics/global_avg_loss"] for log in logs]
    print(_RESULT + json.dumps({**figures(logs), "losses": losses}), flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    argv = list(sys.argv[1:] if argv is None else argv)
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["bf16", "fp8", "torchao_rowwise"]
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=default, help=f"default {' '.join(default)}")
    parser.add_argument("--model", choices=SHAPES, default="llama", help="default llama")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of FSDP2, default 1")
    parser.add_argument("--steps", type=int, default=150, help="default 150")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, not compiled: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    # What a process that this one starts is to run.
    parser.add_argument("--run", choices=RECIPES, help=argparse.SUPPRESS)
    args = parser.parse_args(own)
    if args.layers < 1 or args.steps < 3 or args.gpus < 1:
        parser.error(f"takes 1 layer, 3 steps and 1 GPU or more, got {args.layers}, {args.steps} and {args.gpus}")
    args.more = more
    return args


def missing() -> str | None:
    """What a run lacks here."""
    try:
        importlib.import_module("torchtitan.protocols.model_converter")
    except ImportError as error:
        return f"needs torchtitan 0.2.2 (pip install torchtitan==0.2.2), and an import failed: {error}"
    return None if torch.cuda.is_available() else "torchtitan's trainer needs a GPU; none found"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if (why := missing()) is not None:
        print(f"bench_torchtitan: {why}", file=sys.stderr)
        return 2
    if args.run:
        run_one(args)
        return 0
    arguments = {name: value for name, value in vars(args).items() if name != "run"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = f"_{args.gpus}_gpus" * (args.gpus > 1)
    report = Report(f"torchtitan_{args.model}_{args.layers}_layers{gpus}", device, COLUMNS, arguments)
    baseline = None
    for recipe in args.recipes:
        row = report.attempt(recipe, args.model, measure, args, recipe)
        if row is None:
            continue
        baseline = row["tokens/s"] if recipe == "bf16" else baseline
        ratio = None if baseline is None else row["tokens/s"] / baseline
        report.add({"recipe": recipe, "model": args.model, "gpus": args.gpus, "x bf16": ratio, **row})
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
