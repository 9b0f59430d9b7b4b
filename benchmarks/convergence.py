"""Does a model learn in low precision as it does in bf16? The runs of a study, and the gap to bf16 with its interval.

python benchmarks/convergence.py                                                  # a study of a minute, on any machine
python benchmarks/convergence.py --study benchmarks/studies/25m.json --minutes 25 --results
python benchmarks/convergence.py --study benchmarks/studies/25m.json --minutes 0  # what is done, missing and known

A study is a file of runs (llm_training/study.py). All runs of a seed fork from one bf16 state, and see the same
batches. Each command trains the next runs that fit into its minutes, several at a time where they share a GPU, and
adds them to what other commands, machines and commits have left in --out and benchmarks/results. It uses all GPUs that
CUDA_VISIBLE_DEVICES allows. A run that was cut off goes on from its last checkpoint, as long as --out is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from common import environment
from common.report import RESULTS, markdown, save
from llm_training import checkpoint, products
from llm_training.config import UsageError
from llm_training.data import read_corpus
from llm_training.study import BASE, METRICS, Run, Study, chance, merged, missing_runs, record_of, run_of, table
from llm_training.training import Trainer, train, train_start

SMOKE = Path(__file__).resolve().parent / "studies" / "smoke.json"
# The process, the text, the compiler, the evaluation.
_SETUP_SECONDS = 30
# A checkpoint of a billion parameters takes 17 seconds.
_START, _POLL_SECONDS, _CHECKPOINTS = "start", 0.5, 2


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0: the study is complete, 1: runs are missing or diverged, 2: it could not run."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("convergence", description=__doc__, formatter_class=shown, allow_abbrev=False)
    add = parser.add_argument
    add("--study", type=Path, default=SMOKE, metavar="FILE", help="default: benchmarks/studies/smoke.json")
    add("--minutes", type=float, default=10, help="for training; 0 only reports (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="of runs and checkpoints (default: runs/studies/NAME)")
    add(
        "--data", metavar="PATH", help="a text file, or a folder of them (default: Python's own and installed packages)"
    )
    add("--results", action="store_true", help="write the results into benchmarks/results/ too")
    add("--run", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        study = Study.read(args.study)
        args.out = args.out or Path("runs/studies") / study.name
        args.out.mkdir(parents=True, exist_ok=True)
        if args.run:
            train_one(study, args)
            return 0
        failed = train_until(study, args) if args.minutes > 0 else []
        return report(study, args, failed)
    except UsageError as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 2


# --- one run, in a separate process -----------------------------------------------------------------------------------


def train_one(study: Study, args: argparse.Namespace) -> None:
    """Train the run that --run names, or the start of a seed, and leave a file in --out."""
    recipe, seed, draw = args.run.rsplit("-", 2)
    run, config = Run(recipe, int(seed), int(draw)), study.config_of(int(seed))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(config, cuda_graph=config.cuda_graph and device.type == "cuda")
    corpus = read_corpus(args.data, config.seq_len, config.held_out_sequences, site_packages=device.type == "cuda")
    made_by = environment.environment(device) | {"data": corpus.digest}
    # Of the paths of one machine.
    del made_by["command"]
    file, state = args.out / f"{run.name}.json", checkpoint.start_of(args.out, run.seed)
    with products.computed_in(products.pick() if device.type == "cpu" else "bf16"):
        if recipe == _START:
            from llm_training.operand_errors import operand_errors

            train_start(config, corpus, device, state)
            trainer = Trainer(BASE, config, device)
            trainer.load(state, corpus)
            digest = hashlib.sha256()
            for tensor in trainer.model.state_dict().values():
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            # Compiled layers show nobody their operands.
            eager = Trainer(BASE, replace(config, compile=False), device).model
            eager.load_state_dict(trainer.model.state_dict())
            errors = operand_errors(eager, corpus.batch(run.seed, config.bf16_steps, config.batch_size).to(device))
            content = {"digest": digest.hexdigest()[:16], "seed": run.seed, "operand_errors": errors}
            environment.write_json(file, content | {"environment": made_by})
            return
        folder = args.out / run.name
        folder.mkdir(exist_ok=True)
        every = max(1, config.steps // _CHECKPOINTS)
        result = train(recipe, config, corpus, device, folder, checkpoint_every=every, start=state, draw=run.draw)
    start = json.loads((args.out / f"{Run(_START, run.seed, 0).name}.json").read_text())["digest"]
    environment.write_json(file, record_of(run, start, result, made_by))


# --- all runs ---------------------------------------------------------------------------------------------------------


def train_until(study: Study, args: argparse.Namespace) -> list[str]:
    """Train what is missing until the minutes are over, `at_once` runs on each GPU; returns runs that failed."""
    deadline = time.monotonic() + 60 * args.minutes
    failed: list[str] = []
    running: dict[Run, subprocess.Popen] = {}
    gpus, gpu_of = visible_gpus() or [""], dict[Run, str]()
    tried: set[Run] = set()

    def start(run: Run) -> None:
        tried.add(run)
        command = [sys.executable, __file__, "--study", str(args.study), "--out", str(args.out), "--run", run.name]
        command += ["--data", args.data] if args.data else []
        taken = [gpu_of[other] for other in running]
        gpu_of[run] = min(gpus, key=taken.count)
        # Threads that spin while they wait take the cores from others that work.
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": gpu_of[run]}
        with (args.out / f"{run.name}.log").open("w") as log:
            running[run] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        print(f"{run.name}: started, {(deadline - time.monotonic()) / 60:.1f} minutes left", file=sys.stderr)

    def collect() -> bool:
        """Whether a run has ended since the last call."""
        before = len(running)
        for run, process in list(running.items()):
            if process.poll() is not None:
                del running[run]
                if process.returncode:
                    failed.append(run.name)
                ended = "done" if process.returncode == 0 else f"failed, see {args.out / run.name}.log"
                print(f"{run.name}: {ended}", file=sys.stderr)
        return len(running) < before

    content, starts = read_all(study, args), starts_here(study, args)
    while True:
        if collect():
            content, starts = read_all(study, args), starts_here(study, args)
        left = deadline - time.monotonic()
        waiting = [run for run in missing_runs(study, content["runs"], starts) if run not in tried]
        # Each seed needs its start first.
        nexts = [run if run.seed in starts else Run(_START, run.seed, 0) for run in waiting]
        nexts = [run for run in dict.fromkeys(nexts) if run not in tried and fits(run, content["runs"], left)]
        while nexts and len(running) < study.at_once * len(gpus):
            start(nexts.pop(0))
        if not running or left <= 0:
            break
        time.sleep(_POLL_SECONDS)
    for run, process in running.items():
        process.terminate()
        process.wait()
        print(f"{run.name}: cut off; it goes on from its last checkpoint in {args.out}", file=sys.stderr)
    return sorted(failed)


def visible_gpus() -> list[str]:
    """The GPUs of this process, each as CUDA_VISIBLE_DEVICES names it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (named.split(",") if named else [str(index) for index in range(count)])[:count]


def fits(run: Run, records: list[dict], left: float) -> bool:
    """Whether a run is likely to end within `left` seconds, judged by the same recipe, or else by the slowest."""
    own = [r["seconds"] for r in records if r["recipe"] == run.recipe] or [r["seconds"] for r in records]
    return left > (1.1 * max(own) + _SETUP_SECONDS if own and run.recipe != _START else 0)


def starts_here(study: Study, args: argparse.Namespace) -> dict[int, str]:
    """{seed: digest} of the starts whose states lie in --out."""
    found = {}
    for seed in study.seeds:
        file = args.out / f"{Run(_START, seed, 0).name}.json"
        if file.exists() and checkpoint.start_of(args.out, seed).exists():
            found[seed] = json.loads(file.read_text())["digest"]
    return found


def results_name(study: Study) -> str:
    """Of the files in benchmarks/results."""
    return f"study_{study.name}".replace("-", "_")


def read_all(study: Study, args: argparse.Namespace) -> dict:
    """The starts and runs that are done: of --out, and of the study's results."""
    files = [folder / f"{results_name(study)}.json" for folder in (args.out, RESULTS)]
    contents = [json.loads(file.read_text()) for file in files if file.exists()]
    of_study = {run.name for run in study.runs()}
    records = [json.loads(file.read_text()) for file in sorted(args.out.glob("*.json")) if file.stem in of_study]
    starts = [json.loads(file.read_text()) for file in sorted(args.out.glob(f"{_START}-*.json"))]
    here = {"config": asdict(study.config), "starts": {s["digest"]: s for s in starts}, "runs": records}
    return merged([here, *contents])


def report(study: Study, args: argparse.Namespace, failed: list[str]) -> int:
    """Print what is done, what is missing and the present answer, and write them."""
    content = read_all(study, args)
    records = content["runs"]
    done = {run_of(record) for record in records}
    missing = [run.name for run in study.runs() if run not in done]
    diverged = [run_of(r).name for r in records if r["held_out_loss"] is None]
    config = study.config
    tokens = (config.steps - config.bf16_steps) * config.tokens_per_step
    spreads = [f"{spread:.3f} % of the {METRICS[m]}" for m in METRICS if (spread := chance(records, m)) is not None]
    made_by = [record["environment"] for record in records]
    devices, commits = (", ".join(dict.fromkeys(str(m.get(key)) for m in made_by)) for key in ("device", "commit"))
    made = (made_by[0] if made_by else {}) | {"command": f"--study benchmarks/studies/{study.name}.json"}
    made |= {"device": devices, "commit": commits}
    notes = [
        f"{config.preset}: {config.parameters / 1e6:,.1f} M parameters; {config.bf16_steps:,} steps in bf16, then "
        f"{config.steps - config.bf16_steps:,} steps of {config.tokens_per_step:,} tokens ({tokens / 1e6:,.0f} M) in "
        f"each recipe. Starts: {len({r['start'] for r in records})}. {devices}.",
        "Training loss: mean of the last third of the steps. ±: half of the 95 % interval, from draws that differ in "
        "one bit of each weight.",
        *[f"One bit of the start moves bf16 by {' and '.join(spreads)} (standard deviation)."] * bool(spreads),
        *[f"Missing: {', '.join(missing)}."] * bool(missing),
        *[f"Failed: {', '.join(failed)}; see the logs in {args.out}."] * bool(failed),
        *[f"Diverged: {', '.join(diverged)}."] * bool(diverged),
    ]
    listed = "\n".join(f"- {note}" for note in notes)
    text = "\n\n".join([table(study, records), listed, *error_tables(content["starts"])])
    print(f"\n{text}\n")
    for folder in (args.out, *[RESULTS] * args.results):
        save(folder, results_name(study), content | {"environment": made, "missing": missing}, text)
    return int(bool(missing or failed or diverged))


def error_tables(starts: dict[str, dict]) -> list[str]:
    """The operand errors at the first start that has them, as a table."""
    for start in filter(lambda start: start["operand_errors"], starts.values()):
        rows = [
            (operand, copy, f"{error['median']:.2f} %", f"{error['max']:.2f} %")
            for operand, copies in start["operand_errors"].items()
            for copy, error in copies.items()
        ]
        head = ("operand", "blocks", "error, median layer", "largest")
        return [f"Operands of one microbatch at the fork, ‖quantized - x‖ / ‖x‖:\n\n{markdown(head, rows, left=2)}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
