"""Train the same small Llama-style language model in bf16, blockwise FP8 and NVFP4, and compare them.

python benchmarks/train_llm.py                      # all three, on real text; 2 to 4 minutes on two CPU cores
python benchmarks/train_llm.py --preset 350m --data my_text/ --compile
python benchmarks/train_llm.py --model moe-tiny         # a mixture of experts; likewise
torchrun --nproc-per-node 4 benchmarks/train_llm.py --preset llama3-8b --recipes bf16 --compile    # FSDP2
python benchmarks/train_llm.py --preset 125m --throughput --profile --steps 60 --results [--fuse] [--compile]

--throughput trains nothing to its end: all recipes take turns of a few steps, on batches that are there. Columns:
    host ms     a step until its work is launched, with a wait before each pass, so that the device is never waited for
    peak GiB    all that the model, its optimizer and a step have allocated
    products ms, quantization ms, other ms   of kernels in a step, with --profile, which adds a table of them all
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from pathlib import Path

# Threads that spin while they wait take the cores from others that work: on a busy machine that is five times slower.
# Read when torch is imported.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
import environment
import torch
from llm import checkpoint, products, ranks, report, throughput
from llm.ablation import ABLATIONS
from llm.config import PRESETS, RunConfig, UsageError, override
from llm.data import Corpus, read_corpus
from llm.recipes import DEFAULT, MERGED, RECIPES, SEPARATE
from llm.training import Result, train

RESULTS = Path(__file__).resolve().parent / "results"
_GUARANTEES = """\
Every recipe starts from the same weights and sees the same bytes in the same order; both depend on --seed alone.
On a CPU a run repeats bit for bit (same machine, thread count and versions), and so does one that was interrupted and
resumed. On a GPU the order of additions in PyTorch's backward kernels may vary, so curves repeat closely, not bitwise.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
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
    add("--out", type=Path, default=out, metavar="DIR", help="results and checkpoints (default: %(default)s)")
    what = "where --bf16-steps leaves its state, and finds it in later commands (default: --out)"
    add("--starts", type=Path, metavar="DIR", help=what)
    add("--results", action="store_true", help="write the results into benchmarks/results/ too")
    what = "evaluate the trained weights in these precisions too; for the JSON"
    add("--evaluate-in", nargs="+", choices=[*DEFAULT, *ABLATIONS], default=(), help=what)
    add("--throughput", action="store_true", help="time steps of all recipes, which take turns, and train no further")
    add("--profile", action="store_true", help="with --throughput: where a step's time goes, kernel by kernel")
    numbers = parser.add_argument_group("instead of the preset's values")
    for name, what in (
        ("steps", "optimizer updates"),
        ("batch-size", "sequences a microbatch"),
        ("seq-len", "bytes a sequence"),
        ("grad-accumulation", "microbatches a step"),
    ):
        numbers.add_argument(f"--{name}", type=_positive_int, metavar="N", help=what)
    numbers.add_argument("--warmup", type=_whole_int, metavar="N", help="steps of linear warmup")
    what = "how many of the steps, the first ones, are in bf16, once for all recipes (default: 0)"
    numbers.add_argument("--bf16-steps", type=_whole_int, metavar="N", help=what)
    numbers.add_argument("--seed", type=_whole_int, metavar="N", help="of weights and data order (default: 0)")
    numbers.add_argument("--lr", type=_positive_float, help="peak learning rate")
    what = "what a CPU computes bf16 products in (default: bf16, or fp32 where a short probe finds that far faster)"
    numbers.add_argument("--products", choices=products.PRECISIONS, help=what)
    switch = {"action": "store_const", "const": True}
    numbers.add_argument("--tied-head", help="share the embedding with the output head", **switch)
    what = "q, k, v, gate and up are layers of their own, as transformers has them, and share their inputs in *_fused"
    numbers.add_argument("--fuse", dest="separate", help=what, **switch)
    numbers.add_argument("--compile", help="torch.compile each block", **switch)
    numbers.add_argument("--activation-checkpointing", help="recompute every block in backward", **switch)
    add("--checkpoint-every", type=_positive_int, default=0, metavar="N", help="write a checkpoint every N steps")
    add("--resume", action="store_true", help="continue from the checkpoints in --out")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0: done, 1: a recipe diverged, 2: it could not run, 130: interrupted."""
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
    except KeyboardInterrupt:
        remedy = "continue it with --resume" if args.checkpoint_every else "with --checkpoint-every N it can be resumed"
        print(f"\ntrain_llm: interrupted; {remedy}", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, train every recipe, report."""
    with ranks.joined(pick_device(args.device)) as device:
        return run_on(args, device)


def run_on(args: argparse.Namespace, device: torch.device) -> int:
    """`run` in each process."""
    config = config_from(args, device)
    ranks.check(config, saves=bool(args.checkpoint_every or args.resume))
    if args.evaluate_in and (config.ranks or args.throughput):
        raise UsageError("--evaluate-in: needs one process that trains; leave out torchrun, and --throughput")
    starts = args.starts or args.out
    for folder in (args.out, starts, *([RESULTS] if args.results else ())):
        prepare_folder(folder)
    recipes = recipes_from(args, config)
    if args.resume and not any(checkpoint.path_of(args.out, r).exists() for r in recipes):
        remedy = "run with --checkpoint-every N first, or name its --out"
        raise UsageError(f"--resume: no checkpoint in {args.out}; {remedy}")
    # A few steps need little text.
    everything = device.type == "cuda" and not args.throughput
    corpus = read_corpus(args.data, config.seq_len, config.held_out_sequences, site_packages=everything)
    leads = ranks.number() == 0
    if leads:
        print(opening_line(config, corpus, device, recipes))
    if recipes != ["bf16"] or config.experts:
        import_torchao()
    if args.throughput:
        if config.ranks:
            raise UsageError("--throughput: not with torchrun; see bench_fsdp.py")
        args.smoke, args.out = False, RESULTS if args.results else args.out
        return throughput.measure(recipes, config, corpus, args, results_name(config, device, "throughput"), device)
    how = {"checkpoint_every": args.checkpoint_every, "resume": args.resume, "evaluate_in": args.evaluate_in}
    how["starts"] = starts
    results = [train(r, config, corpus, device, args.out, **how) for r in recipes]
    if not leads:
        return int(any(r.diverged for r in results))
    print(f"\n{report.table(results)}\n\n{report.footnotes(config, corpus, device)}\n")
    write_results(args.out, "train_llm", config, corpus, device, results)
    if args.results:
        write_results(RESULTS, results_name(config, device), config, corpus, device, results)
    return int(any(r.diverged for r in results))


def pick_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU where there is one. Raises UsageError where it is not there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device {name}: no such device; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: runs on cpu or cuda, got {device.type}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"--device {name}: this machine has {count} CUDA device(s); use --device cpu")
    return device


def config_from(args: argparse.Namespace, device: torch.device) -> RunConfig:
    """The preset with the command line's values in place of its own."""
    names = ("steps", "batch_size", "seq_len", "grad_accumulation", "warmup", "bf16_steps", "seed", "lr", "products")
    switches = ("tied_head", "separate", "compile", "activation_checkpointing")
    values = {name: getattr(args, name) for name in (*names, *switches)}
    # In compiled code products cannot be replaced one by one.
    if device.type == "cpu" and not args.products and not args.compile:
        # What is faster here is not what all ranks would find.
        values["products"] = "bf16" if ranks.count() else products.pick()
    if device.type != "cpu" and args.products == "fp32":
        raise UsageError(f"--products fp32: {device} multiplies bf16 itself; leave --products out, or add --device cpu")
    return override(args.preset or default_preset(device), ranks=ranks.count(), **values)


def prepare_folder(folder: Path) -> None:
    """Make `folder`; raises UsageError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"{folder}: not a folder that can be written; choose another --out")


def recipes_from(args: argparse.Namespace, config: RunConfig) -> list[str]:
    """The recipes that the command line names, each once, or those that there are for this model."""
    if args.profile and not args.throughput:
        raise UsageError("--profile looks at steps of --throughput; add that")
    fused = SEPARATE if config.separate else MERGED if args.throughput else DEFAULT
    return list(dict.fromkeys(args.recipes or fused))


def results_name(config: RunConfig, device: torch.device, kind: str = "train_llm") -> str:
    """Of the files in benchmarks/results: train_llm_cpu, train_llm_moe_tiny_cpu, throughput_125m_fuse_compiled.

    Each kind of model and number of steps has its own; what is training's default is left out.
    """
    named = kind != "train_llm" or config.preset != default_preset(device)
    words = [kind, *config.preset.split("-") * named, *["fuse"] * config.separate, *["compiled"] * config.compile]
    if kind == "train_llm":
        # Other results are written by a report, which adds its device itself.
        fewer = config.steps != PRESETS[config.preset].steps
        words += [environment.slug(device), *[f"{config.steps}_steps"] * fewer]
    return "_".join(words)


def default_preset(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "125m"


def opening_line(config: RunConfig, corpus: Corpus, device: torch.device, recipes: list[str]) -> str:
    """What will run, in one line."""
    size = f"{config.parameters / 1e6:.1f} M parameters ({config.preset}), {config.layers} layers of width {config.dim}"
    if config.experts:
        active = f"{config.active_parameters / 1e6:.1f} M parameters active"
        size += f", {config.experts} experts of which a token takes {config.top_k} ({active})"
    text = f"{len(corpus.train) / 1e6:.1f} MB of {corpus.name}"
    over = f" | {config.ranks} ranks of FSDP2" if config.ranks else ""
    work = f"{config.steps:,} steps of {config.tokens_per_step:,} tokens in each of {', '.join(recipes)}"
    emulated = " | bf16 products in fp32, which is faster here" * (config.products == "fp32")
    return f"{environment.device_name(device)} | {size} | {text} | {work}{over}{emulated}"


def write_results(
    folder: Path, name: str, config: RunConfig, corpus: Corpus, device: torch.device, results: list[Result]
) -> None:
    """name.json, name.md and name.png in `folder`."""
    prepare_folder(folder)
    report.write_json(folder / f"{name}.json", config, corpus, device, results)
    report.write_table(folder / f"{name}.md", config, corpus, device, results)
    print(f"wrote {folder / name}.json, .md", end="")
    try:
        from llm.plot import tokens_text, write_plot
    except ImportError:
        print("; no picture: matplotlib is not installed (pip install matplotlib)")
        return
    tokens = tokens_text(config.steps * config.tokens_per_step)
    write_plot(
        folder / f"{name}.png",
        config,
        results,
        title=f"A {config.parameters / 1e6:.1f} M-parameter decoder trained on {tokens} tokens",
        data=f"{corpus.name} · {environment.device_name(device)}",
        unigram_entropy=corpus.unigram_entropy,
    )
    print(", .png")


def import_torchao() -> None:
    """Import torchao without its prints about libraries of other platforms, which are harmless.

    Raises UsageError where it is not installed.
    """
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*register_constant.*")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import torchao.quantization  # noqa: F401
    except ImportError as error:
        remedy = "pip install torchao, or --recipes bf16 with a dense model"
        raise UsageError(f"fp8, nvfp4 and mixtures of experts need torchao ({error}); {remedy}") from None


def _number(text: str, kind, least, what: str):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least(value):
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return value


def _positive_int(text: str) -> int:
    return _number(text, int, lambda v: v > 0, "a whole number above 0")


def _whole_int(text: str) -> int:
    return _number(text, int, lambda v: 0 <= v < 2**31, "a whole number, 0 or above")


def _positive_float(text: str) -> float:
    return _number(text, float, lambda v: 0 < v < float("inf"), "a number above 0")


if __name__ == "__main__":
    sys.exit(main())
