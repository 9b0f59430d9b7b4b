"""Train the same small Llama-style language model in bf16, blockwise FP8 and NVFP4, and compare them.

python benchmarks/train_llm.py                      # all three, on real text; 2 to 4 minutes on two CPU cores
python benchmarks/train_llm.py --preset 350m --data my_text/ --compile
python benchmarks/train_llm.py --model moe-tiny         # a mixture of experts; likewise
python benchmarks/train_llm.py --preset 125m --throughput --profile --steps 60 --results [--fuse] [--compile]

--throughput trains nothing to its end: all recipes take turns of a few steps, on batches that are there. Columns:
    host ms     a step until its work is launched, with a wait before each pass, so that the device is never waited for
    peak GiB    all that the model, its optimizer and a step have allocated
    products ms, quantization ms, other ms   of kernels in a step, with --profile, which adds a table of them all
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

# Threads that spin while they wait take the cores from others that work: on a busy machine that is five times slower.
# Read when torch is imported.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
import math

import torch
from common import environment, plot
from common.report import RESULTS, Report
from llm_training import products, throughput
from llm_training.config import PRESETS, RunConfig, UsageError, override
from llm_training.data import Corpus, read_corpus
from llm_training.recipes import DEFAULT, MERGED, RECIPES, SEPARATE
from llm_training.training import Result, train

HEADER = ("recipe", "held-out loss", "gap to bf16", "train loss", "tokens/s", "weights", "activations", "peak memory")
_GUARANTEES = """\
Every recipe starts from the same weights and sees the same bytes in the same order; both depend only on --seed.
On a CPU a run repeats bit for bit (same machine, thread count and versions). On a GPU the order of additions in
PyTorch's backward kernels may vary, so curves repeat closely, not bitwise.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_llm", description=__doc__, epilog=_GUARANTEES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    what = f"what to compare (default: {', '.join(DEFAULT)}; with --fuse all, with --throughput all that the model has)"
    add("--recipes", nargs="+", choices=RECIPES, help=what)
    add("--preset", "--model", choices=PRESETS, help="model and schedule (default: cpu, with a GPU 125m)")
    add("--data", metavar="PATH", help="a text file, or a folder of them (default: Python's standard library)")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    out = Path("runs/train_llm")
    add("--out", type=Path, default=out, metavar="DIR", help="folder of the results (default: %(default)s)")
    add("--results", action="store_true", help="write the results into benchmarks/results/ too")
    add("--throughput", action="store_true", help="time steps of all recipes, which take turns, and train no further")
    add("--profile", action="store_true", help="with --throughput: where a step's time goes, kernel by kernel")
    numbers = parser.add_argument_group("instead of the preset's values")
    for name, what in {
        "steps": "optimizer updates",
        "batch-size": "sequences a microbatch",
        "seq-len": "bytes a sequence",
        "grad-accumulation": "microbatches a step",
        "warmup": "steps of linear warmup",
        "seed": "of weights and data order (default: 0)",
    }.items():
        numbers.add_argument(f"--{name}", type=int, metavar="N", help=what)
    numbers.add_argument("--lr", type=float, help="peak learning rate")
    switch = {"action": "store_const", "const": True}
    what = "q, k, v, gate and up are separate layers, as in transformers, and share their inputs in *_fused"
    numbers.add_argument("--fuse", dest="separate", help=what, **switch)
    numbers.add_argument("--compile", help="torch.compile each block", **switch)
    numbers.add_argument("--activation-checkpointing", help="recompute every block in backward", **switch)
    numbers.add_argument(
        "--cuda-graph", help="launch each step from a CUDA graph, captured after three steps", **switch
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0: done, 1: a recipe diverged, 2: it could not run."""
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except UsageError as error:
        print(f"train_llm: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        remedy = "lower --batch-size, or add --activation-checkpointing"
        print(f"train_llm: the device ran out of memory; {remedy}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = config_from(args, device)
    if config.cuda_graph and device.type != "cuda":
        raise UsageError("--cuda-graph needs a GPU; leave it out")
    if args.profile and not args.throughput:
        raise UsageError("--profile looks at steps of --throughput; add that")
    # Before hours of training.
    args.out.mkdir(parents=True, exist_ok=True)
    every = SEPARATE if config.separate else MERGED if args.throughput else DEFAULT
    recipes = list(dict.fromkeys(args.recipes or every))
    # A few steps need little text.
    everything = device.type == "cuda" and not args.throughput
    corpus = read_corpus(args.data, config.seq_len, config.held_out_sequences, site_packages=everything)
    print(opening_line(config, corpus, device, recipes))
    if args.throughput:
        args.out = RESULTS if args.results else args.out
        return throughput.measure(recipes, config, corpus, args, results_name(config, device, "throughput"), device)
    trained = [train(r, config, corpus, device) for r in recipes]
    write_results(args, config, corpus, device, trained)
    return int(any(r.diverged for r in trained))


def config_from(args: argparse.Namespace, device: torch.device) -> RunConfig:
    values = {field.name: getattr(args, field.name, None) for field in fields(RunConfig) if field.name != "preset"}
    # In compiled code GEMMs cannot be replaced one by one.
    if device.type == "cpu" and not args.compile:
        values["products"] = products.pick()
    return override(args.preset or default_preset(device), **values)


def results_name(config: RunConfig, device: torch.device, kind: str = "train_llm") -> str:
    """Of the files of results, before the device: train_llm, train_llm_moe_tiny, throughput_125m_fuse_compiled."""
    named = kind != "train_llm" or config.preset != default_preset(device)
    words = [kind, *config.preset.split("-") * named, *["fuse"] * config.separate, *["compiled"] * config.compile]
    words += ["graph"] * config.cuda_graph
    if kind == "train_llm" and config.steps != PRESETS[config.preset].steps:
        words.append(f"{config.steps}_steps")
    return "_".join(words)


def default_preset(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "125m"


def opening_line(config: RunConfig, corpus: Corpus, device: torch.device, recipes: list[str]) -> str:
    size = f"{config.parameters / 1e6:.1f} M parameters ({config.preset}), {config.layers} layers of width {config.dim}"
    if config.experts:
        active = f"{config.active_parameters / 1e6:.1f} M parameters active"
        size += f", {config.experts} experts of which a token takes {config.top_k} ({active})"
    text = f"{len(corpus.train) / 1e6:.1f} MB of {corpus.name}"
    work = f"{config.steps:,} steps of {config.tokens_per_step:,} tokens in each of {', '.join(recipes)}"
    return f"{environment.device_name(device)} | {size} | {text} | {work}"


# --- results of a run -------------------------------------------------------------------------------------------------


def row(result: Result, base: Result | None) -> dict:
    percent = 100 * (result.held_out_loss / base.held_out_loss - 1) if base else math.nan
    return {
        "recipe": result.recipe,
        "held-out loss": f"diverged at step {len(result.losses)}" if result.diverged else f"{result.held_out_loss:.4f}",
        "gap to bf16": None if result is base or math.isnan(percent) else f"{percent:+.2f} %",
        "train loss": None if result.diverged else f"{result.train_loss:.4f}",
        "tokens/s": result.tokens_per_second,
        "weights": _bytes(result.weight_bytes),
        "activations": _bytes(result.activation_bytes),
        "peak memory": _bytes(result.peak_bytes),
        "layers": result.layers,
        "weight_bytes": result.weight_bytes,
        "activation_bytes": result.activation_bytes,
        "peak_bytes": result.peak_bytes,
        "held_out_loss": None if result.diverged else result.held_out_loss,
        "losses": [x if math.isfinite(x) else None for x in result.losses],
        "seconds": result.seconds,
    }


def footnotes(config: RunConfig, corpus: Corpus, device: torch.device) -> str:
    tokens = config.steps * config.tokens_per_step
    read = f"{tokens:,} tokens from {len(corpus.train) / 1e6:,.1f} MB of text ({corpus.name})"
    passes = tokens / len(corpus.train)
    repeated = f"each byte {passes:.1f} times" if passes > 1 else "each byte once"
    notes = [
        f"{environment.device_name(device)}. {read}, {repeated}.",
        "held-out loss: in nats per byte, in the precision of the recipe. "
        "train loss: mean of the last 5 % of the steps, at least 10.",
        "weights: of linear layers and experts, as the GEMMs read them; every recipe also keeps fp32 masters.",
        "activations: saved for backward by one microbatch in eager mode.",
    ]
    if device.type == "cpu":
        notes.append("A CPU emulates low precision: its losses hold for a GPU, its tokens/s and memory do not.")
    if config.products == "fp32":
        notes.append("This processor is slow in bf16: bf16 GEMMs are computed in fp32 on the same operands.")
    return "\n".join(notes)


def write_results(
    args: argparse.Namespace, config: RunConfig, corpus: Corpus, device: torch.device, trained: list[Result]
) -> None:
    """Print the table, and write it with a picture in --out and, with --results, in benchmarks/results."""
    tokens = config.steps * config.tokens_per_step
    data = {
        "name": corpus.name,
        "sha256_16": corpus.digest,
        "train_bytes": len(corpus.train),
        "passes": tokens / len(corpus.train),
        "held_out_sequences": len(corpus.held_out),
        "unigram_entropy": corpus.unigram_entropy,
    }
    name, notes = results_name(config, device), footnotes(config, corpus, device)
    results = Report(name, device, HEADER, asdict(config) | {"parameters": config.parameters, "data": data})
    results.sections.append(notes)
    base = next((r for r in trained if r.recipe == "bf16"), None)
    print()
    for result in trained:
        results.add(row(result, base))
    print(f"\n{notes}")
    gaps = {r.recipe: plot.distance(r.losses, base.losses) for r in trained if base and r is not base}
    title = f"A {config.parameters / 1e6:.1f} M-parameter decoder trained on {tokens / 1e6:,.3g} M tokens"
    subtitle = f"{corpus.name} · {environment.device_name(device)}"
    losses = {f"{r.recipe} {r.held_out_loss:.3f}": r.losses for r in trained}
    for folder in (args.out, *[RESULTS] * args.results):
        picture = results.write(folder).with_suffix(".png")
        plot.draw(picture, title, subtitle, losses, gaps, config.tokens_per_step, corpus.unigram_entropy)


def _bytes(count: int | None) -> str | None:
    if count is None:
        return None
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
