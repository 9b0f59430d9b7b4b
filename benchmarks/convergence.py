"""Train recipes with several seeds, and compare each with bf16 of the same seed: does low precision learn as well?

python benchmarks/convergence.py                                  # bf16, fp8 and nvfp4 with two seeds, on any machine
python benchmarks/convergence.py --recipes bf16 bf16_perturbed fp8 nvfp4_full --seeds 0 1 2 --preset 1b --compile
python benchmarks/convergence.py --merge runs/convergence benchmarks/results/convergence_1b_nvidia_h200.json --results

A run is `train_llm.py` of one recipe and one seed, in a separate process; with several GPUs one runs on each. What is
finished is kept: the same command goes on where it was interrupted. All other options go to train_llm.py.
A gap is between held-out losses of a recipe and of bf16 with the same seed, so with the same weights and order of data.
bf16_perturbed is bf16 with every first weight one bit off: its gap is what chance alone gives.
With --bf16-steps N all recipes of a seed begin with the same state, that of bf16 after N steps, so that chance has had
less time: for recipes that differ little.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from common import environment, plot
from common.report import RESULTS, markdown, save
from llm_training.config import RunConfig, UsageError
from llm_training.recipes import RECIPES

_TRAIN = Path(__file__).resolve().with_name("train_llm.py")
# Where a run leaves its files, of its recipe and seed.
_FOLDER, _FILE = "{}_seed_{}", "train_llm.json"
HEADER = ("recipe", "seeds", "held-out loss", "gap to bf16", "least, most", "tokens/s", "peak memory")


class Run(NamedTuple):
    """One finished run: what `train_llm.py` wrote of it."""

    recipe: str
    seed: int
    content: dict

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    @property
    def row(self) -> dict:
        """Its row of the table; a run has one recipe."""
        return self.content["table"][0]

    @property
    def loss(self) -> float:
        """Held-out loss; NaN where the run diverged."""
        return _number(self.row["held_out_loss"])

    @property
    def curve(self) -> list[float]:
        """Training loss of each step."""
        return [_number(x) for x in self.content["curves"][self.recipe]["loss"]]

    @property
    def kind(self) -> str:
        """The configuration that runs must share to be compared; an option that there was not has its default."""
        config, content = self.content["config"], self.content
        shape = {f.name: config.get(f.name, f.default) for f in fields(RunConfig) if f.name != "seed"}
        made_of = f"{content['environment']['device']}, data {content['data']['sha256_16']}"
        return f"{made_of}, {json.dumps(shape, default=str)}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0: all runs are there, 1: some are missing or diverged, 2: it could not run."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("convergence", description=__doc__, formatter_class=shown, allow_abbrev=False)
    add = parser.add_argument
    add("--recipes", nargs="+", choices=RECIPES, default=["bf16", "fp8", "nvfp4"], help="default: bf16 fp8 nvfp4")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="default: 0 1")
    add("--out", type=Path, default=Path("runs/convergence"), metavar="DIR", help="default: %(default)s")
    what = "train nothing; take the runs of these folders, and of results that this program wrote"
    add("--merge", nargs="+", type=Path, default=[], metavar="PATH", help=what)
    add("--results", action="store_true", help="write the table into benchmarks/results/ too")
    args, others = parser.parse_known_args(argv)
    try:
        if args.merge and others:
            raise UsageError(f"--merge trains nothing, got {' '.join(others)}; leave one of them out")
        if not args.merge:
            train_all(args, others)
        return report(args, found_in([args.out, *args.merge]))
    except UsageError as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 2


def train_all(args: argparse.Namespace, others: list[str]) -> None:
    """Train what is not there yet, one run a GPU; a run that fails is named at the end, and the others go on."""
    wanted = [(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    missing = [pair for pair in wanted if not (args.out / _FOLDER.format(*pair) / _FILE).exists()]
    # A CPU trains one after the other.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices: queue.Queue[str] = queue.Queue()
    for device in visible.split(","):
        devices.put(device)

    def train(pair: tuple[str, int]) -> None:
        recipe, seed = pair
        folder, device = args.out / _FOLDER.format(recipe, seed), devices.get()
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


def found_in(places: list[Path]) -> list[Run]:
    """The finished runs of these folders and results, by recipe; of two of one recipe and seed the first.

    Raises UsageError where none is there, or where they differ in more than recipe and seed.
    """
    found: dict[tuple[str, int], Run] = {}
    for place in places:
        for run in runs_of_results(place) if place.is_file() else runs_in(place):
            found.setdefault((run.recipe, run.seed), run)
    order = list(RECIPES)
    # A recipe of an earlier result may be gone.
    runs = sorted(found.values(), key=lambda r: (order.index(r.recipe) if r.recipe in order else len(order), r.seed))
    if not runs:
        raise UsageError(f"no finished run in {', '.join(map(str, places))}; see the log.txt of each")
    kinds = sorted({run.kind for run in runs})
    if len(kinds) > 1:
        said = "; ".join(kinds)
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


def rows(runs: list[Run]) -> list[dict]:
    """The table as data, a dict a recipe; None where there is no value."""
    base, made = {run.seed: run.loss for run in runs if run.recipe == "bf16"}, []
    for recipe in dict.fromkeys(run.recipe for run in runs):
        own = [run for run in runs if run.recipe == recipe]
        gaps = [100 * (run.loss / base[run.seed] - 1) for run in own if run.seed in base]
        peaks = [run.row["peak_bytes"] for run in own]
        speeds = [run.row["tokens_per_second"] for run in own if run.row["tokens_per_second"] is not None]
        made.append(
            {
                "recipe": recipe,
                "layers": own[0].row["layers"],
                "seeds": [run.seed for run in own],
                "held_out_losses": [run.row["held_out_loss"] for run in own],
                "gaps_percent": gaps,
                "mean_gap_percent": statistics.fmean(gaps) if gaps else None,
                "tokens_per_second": statistics.median(speeds) if speeds else None,
                "peak_bytes": None if None in peaks else max(peaks),
            }
        )
    return made


def cells(row: dict) -> tuple[str, ...]:
    """A line of the table."""
    gaps, mean, spread = row["gaps_percent"], "-", "-"
    if gaps and row["recipe"] != "bf16":
        mean, spread = f"{row['mean_gap_percent']:+.2f} %", f"{min(gaps):+.2f}, {max(gaps):+.2f} %"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
    loss = f"{statistics.fmean(map(_number, row['held_out_losses'])):.4f}"
    return row["recipe"], ", ".join(map(str, row["seeds"])), loss, mean, spread, speed, peak


def report(args: argparse.Namespace, runs: list[Run]) -> int:
    """Print the table and what is missing, and write both with the picture."""
    config, content = runs[0].content["config"], runs[0].content
    there = {(run.recipe, run.seed) for run in runs}
    wanted = [] if args.merge else [(recipe, seed) for recipe in args.recipes for seed in args.seeds]
    missing = [f"{recipe}, seed {seed}" for recipe, seed in wanted if (recipe, seed) not in there]
    # Those that have one in bf16 with their seed; all, where none is in bf16.
    seeds = {run.seed for run in runs if run.recipe == "bf16"}
    shown = [run for run in runs if run.seed in seeds or not seeds]
    alone = [f"{run.name}: {run.loss:.4f}" for run in runs if run not in shown]
    diverged = [run.name for run in runs if math.isnan(run.loss)]
    tokens_a_step = config["batch_size"] * config["grad_accumulation"] * config["seq_len"]
    shared, device = config.get("bf16_steps", 0), content["environment"]["device"]
    model = f"{device}. {config['preset']}: {config['parameters'] / 1e6:,.1f} M parameters, {config['steps']:,} steps"
    notes = [
        f"{model}, {config['steps'] * tokens_a_step:,} tokens of {content['data']['name']} "
        f"({content['data']['sha256_16']}), which are read {content['data']['passes']:.2f} times.",
        *[f"The first {shared:,} steps are in bf16, and the same for all recipes of a seed."] * bool(shared),
        "gap: held-out loss above that of bf16 with the same seed; mean, then least and most, over the seeds.",
        *[f"Not in the table, as there is no bf16 of the same seed: {'; '.join(alone)}."] * bool(alone),
        *[f"Not there: {'; '.join(missing)}."] * bool(missing),
        *[f"Diverged: {'; '.join(diverged)}."] * bool(diverged),
    ]
    table = rows(shown)
    text = f"{markdown(HEADER, map(cells, table))}\n\n" + "\n".join(notes)
    print(f"\n{text}\n")
    # Runs with a shared start are another table than those without.
    slug = environment.slug_of(device) if "NVIDIA" in device else "cpu"
    name = "_".join(["convergence", *config["preset"].split("-"), *[f"after_{shared}"] * bool(shared), slug])
    commits = {run.name: run.content["environment"]["commit"] for run in runs}
    made = content["environment"] | {"command": command_of(runs), "commit": ", ".join(dict.fromkeys(commits.values()))}
    written = {"config": config, "data": content["data"], "environment": made, "table": table, "missing": missing}
    written["runs"] = {r.name: r.row | r.content["curves"][r.recipe] | {"commit": commits[r.name]} for r in runs}
    base = {run.seed: run.curve for run in runs if run.recipe == "bf16"}
    gaps: dict[str, list[list[float]]] = {}
    for run in runs:
        if run.recipe != "bf16" and run.seed in base:
            gaps.setdefault(run.recipe, []).append(plot.distance(run.curve, base[run.seed]))
    for folder in (args.out, *[RESULTS] * args.results):
        path = save(folder, name, written, text)
        if gaps:
            plot.draw(path.with_suffix(".png"), "Distance to bf16 of the same seed", model, {}, gaps, tokens_a_step)
    return int(bool(missing or diverged))


def command_of(runs: list[Run]) -> str:
    """The options that make all of these runs."""
    others = re.sub(r"--(recipes|seeds?|out|starts)( (?!--)\S+)+", "", runs[0].content["environment"]["command"])
    recipes = " ".join(dict.fromkeys(run.recipe for run in runs))
    seeds = " ".join(map(str, sorted({run.seed for run in runs})))
    return f"--recipes {recipes} --seeds {seeds} {others.strip()}".strip()


def _number(x: float | None) -> float:
    return math.nan if x is None else x


if __name__ == "__main__":
    sys.exit(main())
