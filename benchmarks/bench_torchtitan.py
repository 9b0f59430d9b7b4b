"""torchtitan's own trainer on one GPU: tokens/s and memory in bf16, converted by this package, and by torchao.

A few layers of a torchtitan model with its head, on random tokens: fp32 masters under FSDP2 with one rank, compiled
block by block as torchtitan does, AdamW, no activation checkpointing. In "graph" rows torchtitan captures forward and
backward as a CUDA graph (its default where no experts are). Figures are torchtitan's own, of the last --log-freq steps;
the loss is that of the last step, and equal batches make it comparable. A profile of the steps after these tells what
kernels take: where their sum is far below a step, the step waits for the host. fp8_128x128 has these blocks of
grad_weight; "_deep_gemm" multiplies with that library. Writes benchmarks/results/torchtitan_<model>_<device>.json
and .md; with "graph" rows, the name ends in "_graph".

    python benchmarks/bench_torchtitan.py [--model llama3-8B --layers 6 --tokens 8192] [--recipes bf16 fp8]
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import driver
from common.kernel_times import GROUP_COLUMNS, group_ms, kernels_of, longest
from common.report import Report

MODELS = {"llama3-8B": 6, "deepseek_v3-16B": 4, "llama3-debugmodel": 2, "deepseek_v3-debugmodel": 2}
RECIPES = ("bf16", "fp8", "fp8_128x128", "fp8_128x128_deep_gemm", "fp8_128x128_saved", "torchao_rowwise")
COLUMNS = ("recipe", "launch", "tokens/s", "x bf16", "ms a step", "peak GiB", "loss", *GROUP_COLUMNS)
# Steps that are profiled.
_LOOKED_AT = 3


def converters_of(recipe: str) -> list[Any]:
    """What torchtitan's `model_registry` takes; output heads stay in bf16."""
    from torchtitan.components.quantization import Float8LinearConverter

    from torchao_blockwise.integrations.torchtitan import BlockwiseConverter

    if recipe == "bf16":
        return []
    if recipe == "torchao_rowwise":
        return [Float8LinearConverter.Config(recipe_name="rowwise", filter_fqns=["lm_head"])]
    options: dict[str, Any] = {"grad_weight_blocks": "128x128" if "128x128" in recipe else "1x128"}
    options |= {"save_weights": "quantized"} if recipe.endswith("_saved") else {}
    options |= {"backend": "deep_gemm"} if recipe.endswith("_deep_gemm") else {}
    return [BlockwiseConverter.Config(format="fp8", options=options)]


def components() -> tuple[type, type]:
    """Return a tokenizer that does nothing, and a loader of random tokens, which differ by step and rank."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, tokenizer_path=""):
            super().__init__()

        encode = decode = get_vocab_size = None

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            vocabulary: int

        def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
            self.vocabulary, self.ranks, self.rank = config.vocabulary, dp_world_size, dp_rank
            self.batch, self.length, self.step = local_batch_size, seq_len + 1, 0

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(self.step)
                every = torch.randint(self.vocabulary, (self.batch * self.ranks, self.length), generator=generator)
                tokens = every[self.rank * self.batch :][: self.batch]
                self.step += 1
                positions = torch.arange(self.length - 1).expand(self.batch, -1)
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    return Tokenizer, Tokens


def train(model: str, recipe: str, graph: bool, args: Namespace) -> dict[str, Any]:
    """Train in torchtitan, and return a row: what it logs last."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    # The last trainer's process group is gone, and its options for inductor are not to stay.
    # Port 0 is any free port.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch._dynamo.reset()
    torch._inductor.config.emulate_precision_casts = False

    name, flavor = model.split("-")
    tokenizer, tokens = components()
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor, converters=converters_of(recipe))
    spec.model.layers = spec.model.layers[: args.layers or MODELS[model]]
    for layer in spec.model.layers if args.attention == "sdpa" else ():
        # Each sequence is one document, for which causal attention is enough.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    words = spec.model.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer.Config(
            model_spec=spec,
            loss=CrossEntropyLoss.Config(global_vocab_size=words),
            tokenizer=tokenizer.Config(),
            dataloader=tokens.Config(vocabulary=words),
            optimizer=default_adamw(lr=3e-4),
            training=TrainingConfig(
                local_batch_size=args.tokens // args.seq_len,
                seq_len=args.seq_len,
                steps=args.steps,
                disable_cuda_graphs=not graph,
            ),
            metrics=MetricsProcessor.Config(log_freq=args.log_freq),
            compile=CompileConfig(enable=True),
            activation_checkpoint=None,
            debug=DebugConfig(seed=1),
            dump_folder=folder,
        ).build()
        logged: dict[str, Any] = {}
        trainer.metrics_processor.logger.log = lambda metrics, step: logged.update(metrics)
        try:
            trainer.train()
            measured, batches = dict(logged), trainer.batch_generator(trainer.dataloader)
            # The schedule of the learning rate has no more steps.
            trainer.lr_schedulers.step = lambda: None
            kernels = kernels_of(lambda: trainer.train_step(batches), trainer.device, _LOOKED_AT)
        finally:
            trainer.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    rate = measured["throughput(tps)"]
    return {
        "recipe": recipe,
        "launch": "graph" if graph else "kernels",
        "tokens/s": rate,
        "ms a step": 1e3 * args.tokens / rate,
        "peak GiB": measured["memory/max_active(GiB)"],
        "loss": float(measured["loss_metrics/global_avg_loss"]),
        **group_ms(kernels),
        "kernels": longest(kernels),
    }


def add(results: Report, args: Namespace, recipe: str, launch: str) -> None:
    row = train(args.model, recipe, launch == "graph", args)
    base = next((r for r in results.rows if r["recipe"] == "bf16" and r["launch"] == launch), row)
    results.add(row | {"x bf16": row["tokens/s"] / base["tokens/s"]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__, recipes=(RECIPES, ("bf16", "fp8", "fp8_128x128", "torchao_rowwise")))
    parser.add_argument("--model", choices=MODELS, default="llama3-8B")
    parser.add_argument("--attention", choices=("flex", "sdpa"), default="sdpa", help="default %(default)s")
    parser.add_argument("--launch", nargs="+", choices=("graph", "kernels"), default=["kernels"])
    driver.add_numbers(parser, layers=0, tokens=8192, seq_len=8192, steps=60, log_freq=20)
    args, device = driver.parse(parser, argv)
    name = f"torchtitan_{args.model.replace('-', '_').lower()}" + "_graph" * ("graph" in args.launch)
    results = Report(name, device, COLUMNS, vars(args))
    work = [
        ("all", f"{recipe}, {launch}", partial(add, results, args, recipe, launch))
        for launch in args.launch
        for recipe in args.recipes
    ]
    return driver.run(results, work)


if __name__ == "__main__":
    sys.exit(main())
