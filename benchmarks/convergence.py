"""Train recipes with several seeds, and compare each with bf16 of the same seed: does low precision learn as well?

python benchmarks/convergence.py                                  # bf16, fp8 and nvfp4 with two seeds, on any machine
python benchmarks/convergence.py --recipes bf16 bf16_perturbed fp8 nvfp4_full --seeds 0 1 2 --preset 1b --compile
python benchmarks/convergence.py --merge runs/convergence benchmarks/results/convergence_1b_nvidia_h200.json --results

A run is `train_llm.py` of one recipe and one seed, as a process of its own; with several GPUs one runs on each. What is
finished is kept: the same command goes on where it was interrupted. All other options go to train_llm.py.
A gap is between held-out losses of a recipe and of bf16 with the same seed, so with the same weights and order of data.
bf16_perturbed is bf16 with every first weight one bit off: its gap is what chance alone gives.
With --bf16-steps N all recipes of a seed begin with the same state, that of bf16 after N steps, so that chance has had
less time: for recipes that differ little, such as those that leave one operand of FP8 in bf16 (fp8_faked_but_*).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NamedTuple

import environment
import torch
from llm.config import RunConfig, UsageError
from llm.recipes import RECIPES

RESULTS = Path(__file__).resolve().parent / "results"
_TRAIN = Path(__file__).resolve().with_name("train_llm.py")
_FILE = "train_llm.json"
HEADER = ("recipe", "seeds", "held-out loss", "gap to bf16", "least, most", "tokens/s", "peak memory")


class Run(NamedTuple):
    """One finished run: what `train_llm.py` wrote of it."""

    recipe: str
    seed: int
    content: dict

    @property
    def row(self) -> dict:
        """Its row of the table; a run has one recipe."""
        return self.content["table"][0]

    @property
    def loss(self) -> float:
        """Held-out loss; NaN where the run diverged."""
        found = self.row["held_out_loss"]
        return math.nan if found is None else found

    @property
    def curve(self) -> list[float]:
        """Training loss of each step."""
        return [math.nan if x is None else x for x in self.content["curves"][self.recipe]["loss"]]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("convergence", description=__doc__, formatter_class=shown, allow_abbrev=False)
    add = parser.add_argument
    add("--recipes", nargs="+", choices=RECIPES, default=["bf16", "fp8", "nvfp4"], help="default: bf16 fp8 nvfp4")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="default: 0 1")
    add("--out", type=Path, default=Path("runs/convergence"), metavar="DIR", help="default: %(default)s")
    add(
        "--merge", nargs="+", type=Path, default=[], metavar="PATH",
        help="train nothing; take the runs of these folders, and of results that this program wrote",
    )  # fmt: skip
    add(
        "--untimed", nargs="+", type=Path, default=[], metavar="PATH",
        help="merge these too, without their tokens/s: the runs shared a GPU",
    )  # fmt: skip
    add("--results", action="store_true", help="write the table into benchmarks/results/ too")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0: all runs are there, 1: some are missing or diverged, 2: it could not run."""
    args, others = make_parser().parse_known_args(argv)
    try:
        merges = bool(args.merge or args.untimed)
        if merges and others:
            raise UsageError(f"--merge and --untimed train nothing, got {' '.join(others)}; leave one of them out")
        if not merges:
            train_all(args, others)
        runs = found_in([args.out, *args.merge], args.untimed)
        return report(args, runs)
    except UsageError as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 2


def train_all(args: argparse.Namespace, others: list[str]) -> None:
    """Train what is not there yet, one run a GPU; a run that fails is named at the end, and the others go on."""
    wanted = [(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    missing = [pair for pair in wanted if not (folder_of(args.out, *pair) / _FILE).exists()]
    # A CPU trains one after the other.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices: queue.Queue[str] = queue.Queue()
    for device in visible.split(","):
        devices.put(device)

    def train(pair: tuple[str, int]) -> None:
        recipe, seed = pair
        folder, device = folder_of(args.out, recipe, seed), devices.get()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(_TRAIN), "--recipes", recipe, "--seed", str(seed), "--out", str(folder), *others]
        command += ["--starts", str(args.out)] if "--bf16-steps" in others else []
        place = {"CUDA_VISIBLE_DEVICES": device} if torch.cuda.is_available() else {}
        try:
            with (folder / "log.txt").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **place}).returncode
        finally:
            devices.put(device)
        ended = "done" if code == 0 else f"ended with code {code}, see {folder / 'log.txt'}"
        print(f"{recipe}, seed {seed}: {ended}", file=sys.stderr)

    # The first run of a seed leaves the start that the others begin with.
    starts = {seed: (recipe, seed) for recipe, seed in reversed(missing)}.values() if "--bf16-steps" in others else []
    with ThreadPoolExecutor(devices.qsize()) as pool:
        for pairs in (starts, [pair for pair in missing if pair not in starts]):
            list(pool.map(train, pairs))


def command_of(runs: list[Run]) -> str:
    """The options that make all of these runs."""
    others = re.sub(
        r"--(recipes|seeds?|out|starts)( (?!--)\S+)+", "", runs[0].content["environment"]["command"]
    ).strip()
    recipes = dict.fromkeys(run.recipe for run in runs)
    seeds = sorted({run.seed for run in runs})
    return f"--recipes {' '.join(recipes)} --seeds {' '.join(map(str, seeds))} {others}".strip()


def folder_of(out: Path, recipe: str, seed: int) -> Path:
    """Where a run leaves its files."""
    return out / f"{recipe}_seed_{seed}"


def found_in(places: list[Path], untimed: Sequence[Path] = ()) -> list[Run]:
    """The finished runs of these folders and results, by recipe; of two of one recipe and seed the first.

    Those of `untimed` lose their tokens/s.

    Raises UsageError where none is there, or where they differ in more than recipe and seed.
    """
    found: dict[tuple[str, int], Run] = {}
    for place in [*places, *untimed]:
        for run in runs_of_results(place) if place.is_file() else runs_in(place):
            first = found.setdefault((run.recipe, run.seed), run)
            if first is run and place in untimed:
                run.row["tokens_per_second"] = None
    runs = sorted(found.values(), key=lambda run: (list(RECIPES).index(run.recipe), run.seed))
    if not runs:
        looked = ", ".join(map(str, [*places, *untimed]))
        raise UsageError(f"no finished run in {looked}; see the log.txt of each")
    kinds = {_kind(run) for run in runs}
    if len(kinds) > 1:
        said = "; ".join(sorted(kinds))
        raise UsageError(f"runs of different models, data or machines cannot be compared: {said}; merge those alike")
    return runs


def runs_in(folder: Path) -> list[Run]:
    """The finished runs that were trained into this folder."""
    contents = [json.loads(file.read_text()) for file in sorted(folder.glob(f"*/{_FILE}"))]
    return [Run(content["table"][0]["recipe"], content["config"]["seed"], content) for content in contents]


def runs_of_results(file: Path) -> list[Run]:
    """The runs of a table that `report` wrote."""
    try:
        content = json.loads(file.read_text())
        runs = content["runs"].items()
    except (ValueError, KeyError):
        raise UsageError(f"--merge {file}: not a result of this program; give its .json, or a folder of runs") from None
    made = []
    for name, row in runs:
        recipe, _, seed = name.rpartition(", seed ")
        config = content["config"] | {"seed": int(seed)}
        made_by = content["environment"] | {"commit": row.get("commit", content["environment"]["commit"])}
        one = {"table": [row], "curves": {recipe: row}, "config": config, "environment": made_by}
        made.append(Run(recipe, int(seed), content | one))
    return made


def _kind(run: Run) -> str:
    """What runs must share to be compared."""
    config, content = run.content["config"], run.content
    # Of a run that was made before an option there was: its default.
    defaults = {field.name: field.default for field in fields(RunConfig) if field.default is not MISSING}
    shape = {name: value for name, value in sorted((defaults | config).items()) if name != "seed"}
    return f"{content['environment']['device']}, data {content['data']['sha256_16']}, {json.dumps(shape)}"


def gaps(runs: list[Run], recipe: str) -> list[float]:
    """Held-out losses of `recipe` above those of bf16 with the same seed, in %."""
    base = {run.seed: run.loss for run in runs if run.recipe == "bf16"}
    return [100 * (run.loss / base[run.seed] - 1) for run in runs if run.recipe == recipe and run.seed in base]


def compared(runs: list[Run]) -> list[Run]:
    """The runs that have one in bf16 with their seed; all, where none is in bf16."""
    seeds = {run.seed for run in runs if run.recipe == "bf16"}
    return [run for run in runs if run.seed in seeds or not seeds]


def rows(runs: list[Run]) -> list[dict]:
    """The table as data, a dict a recipe; None where there is no value."""
    runs, made = compared(runs), []
    for recipe in dict.fromkeys(run.recipe for run in runs):
        own, distances = [run for run in runs if run.recipe == recipe], gaps(runs, recipe)
        peaks = [run.row["peak_bytes"] for run in own]
        speeds = [run.row["tokens_per_second"] for run in own if run.row["tokens_per_second"] is not None]
        made.append(
            {
                "recipe": recipe,
                "layers": own[0].row["layers"],
                "seeds": [run.seed for run in own],
                "held_out_losses": [run.row["held_out_loss"] for run in own],
                "gaps_percent": distances,
                "mean_gap_percent": statistics.fmean(distances) if distances else None,
                "tokens_per_second": statistics.median(speeds) if speeds else None,
                "peak_bytes": None if None in peaks else max(peaks),
            }
        )
    return made


def table(runs: list[Run]) -> str:
    """The runs as a Markdown table."""
    lines = [f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    for row in rows(runs):
        losses = [math.nan if x is None else x for x in row["held_out_losses"]]
        distances = row["gaps_percent"]
        mean, spread = "-", "-"
        if distances and row["recipe"] != "bf16":
            mean, spread = f"{row['mean_gap_percent']:+.2f} %", f"{min(distances):+.2f}, {max(distances):+.2f} %"
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
        speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        seeds, loss = ", ".join(map(str, row["seeds"])), f"{statistics.fmean(losses):.4f}"
        cells = row["recipe"], seeds, loss, mean, spread, speed, peak
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(args: argparse.Namespace, runs: list[Run]) -> int:
    """Print the table and what is missing, and write both with the picture."""
    config, content = runs[0].content["config"], runs[0].content
    there = {(run.recipe, run.seed) for run in runs}
    wanted = [] if args.merge or args.untimed else [(recipe, seed) for recipe in args.recipes for seed in args.seeds]
    missing = [f"{recipe}, seed {seed}" for recipe, seed in wanted if (recipe, seed) not in there]
    shown = compared(runs)
    alone = [f"{run.recipe}, seed {run.seed}: {run.loss:.4f}" for run in runs if run not in shown]
    diverged = [f"{run.recipe}, seed {run.seed}" for run in runs if math.isnan(run.loss)]
    tokens = config["steps"] * config["batch_size"] * config["grad_accumulation"] * config["seq_len"]
    shared = config.get("bf16_steps", 0)
    notes = [
        f"{content['environment']['device']}. {config['preset']}: {config['parameters'] / 1e6:,.1f} M parameters, "
        f"{config['steps']:,} steps, {tokens:,} tokens of {content['data']['name']} ({content['data']['sha256_16']}), "
        f"which are read {content['data']['passes']:.2f} times.",
        *[f"The first {shared:,} steps are in bf16, and the same for all recipes of a seed."] * bool(shared),
        "gap: held-out loss above that of bf16 with the same seed; mean, then least and most, over the seeds.",
        *_evaluations(runs),
        *[f"Not in the table, as there is no bf16 of the same seed: {'; '.join(alone)}."] * bool(alone),
        *[f"Not there: {'; '.join(missing)}."] * bool(missing),
        *[f"Diverged: {'; '.join(diverged)}."] * bool(diverged),
    ]
    text = f"{table(runs)}\n\n" + "\n".join(notes) + "\n"
    print(f"\n{text}")
    device = content["environment"]["device"]
    slug = environment.slug_of(device) if "NVIDIA" in device else "cpu"
    # Runs with a shared start are another table than those without.
    name = "_".join(["convergence", *config["preset"].split("-"), *[f"after_{shared}"] * bool(shared), slug])
    for folder in (args.out, *[RESULTS] * args.results):
        folder.mkdir(parents=True, exist_ok=True)
        environment.write_text(folder / f"{name}.md", text)
        commits = [run.content["environment"]["commit"] for run in runs]
        curves = {
            f"{run.recipe}, seed {run.seed}": run.row | run.content["curves"][run.recipe] | {"commit": commit}
            for run, commit in zip(runs, commits)
        }
        made = content["environment"] | {"command": command_of(runs), "commit": ", ".join(dict.fromkeys(commits))}
        parts = {"config": content["config"], "data": content["data"], "environment": made}
        written = parts | {"table": rows(runs), "runs": curves, "missing": missing}
        environment.write_json(folder / f"{name}.json", written)
        _write_picture(folder / f"{name}.png", runs, notes[0])
    return int(bool(missing or diverged))


def _evaluations(runs: list[Run]) -> list[str]:
    """What --evaluate-in of `train_llm.py` found: trained weights in other precisions."""
    lines = []
    for run in runs:
        if found := run.row.get("evaluated_in"):
            losses = ", ".join(f"{loss:.4f} in {name}" for name, loss in found.items())
            lines.append(f"Held-out loss of the weights of {run.recipe}, seed {run.seed}: {losses}.")
    return lines


def _write_picture(path: Path, runs: list[Run], below: str) -> None:
    """Gaps of the training loss to bf16 over the steps: the mean of the seeds, and a band from least to most."""
    try:
        from llm.plot import smooth
        from picture import FAINT, STYLE, entitle, plt, save
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    base = {run.seed: run.curve for run in runs if run.recipe == "bf16"}
    names = [r for r in dict.fromkeys(run.recipe for run in runs) if r != "bf16"]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 5), layout="constrained")
        for name in names:
            curves = []
            for run in (run for run in runs if run.recipe == name and run.seed in base):
                span = max(3, len(run.curve) // 20)
                pairs = zip(smooth(run.curve, span), smooth(base[run.seed], span))
                curves.append([100 * (x / y - 1) for x, y in pairs])
            if not curves:
                continue
            points = list(zip(*curves))
            steps = range(1, len(points) + 1)
            (line,) = ax.plot(steps, [statistics.fmean(p) for p in points], linewidth=1.7, label=name)
            band = [min(p) for p in points], [max(p) for p in points]
            ax.fill_between(steps, *band, color=line.get_color(), alpha=0.2)
        ax.axhline(0, color=FAINT, linewidth=1)
        ax.set_xlabel("steps")
        ax.set_ylabel("training loss above bf16's, % (smoothed)")
        if ax.lines[:-1]:
            ax.legend(frameon=False)
        entitle(figure, ax, "Distance to bf16 of the same seed", below.split(" of ")[0])
        save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
