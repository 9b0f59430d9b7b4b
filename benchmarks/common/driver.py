"""How benchmarks run: their options, and their jobs one by one, each checked, then timed together with its peers."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from common import report
from common.report import Report
from common.shapes import add_shapes, choose
from common.timing import Timing, input_sets, time_runs
from torchao_blockwise.ops import Backend

_NOTES = """\
Results are checked before they are timed. Kernels are replayed from CUDA graphs with a cold cache. roofline us is the
greater of the bytes that must move over the copy bandwidth, and the operations over the rate of cuBLASLt's tensorwise
FP8, both measured in the run. "x NAME" is the time of NAME over that of the row: above 1 the row is faster.
Writes <name>_<device>.json and .md in --out, by default in benchmarks/results.
"""
# Of a report, by what bounds its jobs; `by` names our way.
_COLUMNS = {
    "bytes": ("us", "spread %", "MiB", "TB/s", "roofline us", "of roofline"),
    "flops": ("by", "us", "spread %", "TFLOP/s", "roofline us", "of roofline", "error"),
}
# A rate above the measured peak times this is not believed.
_TOO_FAST = 1.5


class Peer(NamedTuple):
    """One way of others to do a job.

    run: (*arguments) -> the result, or None where it is written into its last argument.
    prepare: (*inputs of the job) -> arguments of `run`, out of time.
    same_operands: it multiplies our operands, so that its error is only that of accumulation.
    finish: what `run` returned -> what ours would return, for the check.
    """

    run: Callable
    prepare: Callable[..., tuple] = lambda *inputs: inputs
    same_operands: bool = False
    finish: Callable = lambda out: out


@dataclass(frozen=True)
class Job:
    """One thing to time, by one way of ours or more.

    labels: what tells its rows apart, by column. make: gives fresh inputs.
    ours: inputs -> {name: (*inputs) -> the result, or why it cannot run here}; the name is in the column `by`.
    check: (result, inputs, peer or None) -> its error, if it has one; raises Wrong.
    peers: name -> what gives the Peer; may raise Unavailable.
    nbytes: that must move. flops: 0 where only bytes count. more: what else its rows hold.
    """

    labels: Mapping[str, str]
    make: Callable[[], tuple]
    ours: Callable[[tuple], Mapping[str, Callable | str]]
    check: Callable[[object, tuple, Peer | None], float | None]
    peers: Mapping[str, Callable[[], Peer]]
    nbytes: int
    flops: int = 0
    more: Mapping = field(default_factory=dict)

    @property
    def where(self) -> str:
        return " ".join(self.labels.values())


def parser(
    doc: str, shapes: tuple[Mapping[str, list], str | Sequence[str]] | None = None,
    **choices: tuple[Iterable[str], Sequence[str]],
) -> argparse.ArgumentParser:  # fmt: skip
    """The options of every benchmark, --shapes as of `add_shapes`, and each of `choices`: (allowed values, default)."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (there, default) in choices.items():
        shown = f"default {' '.join(default)}" if default else "default none"
        made.add_argument(f"--{name}", nargs="*", choices=list(there), default=list(default), help=shown)
    if shapes:
        add_shapes(made, *shapes)
    made.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    return made


def add_numbers(to: argparse.ArgumentParser, **defaults: int) -> None:
    for name, default in defaults.items():
        to.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")


def add_backends(to: argparse.ArgumentParser) -> None:
    to.add_argument("--backends", nargs="+", choices=[b.value for b in Backend if b is not Backend.AUTO])


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Return the arguments, with --smoke, and the device; exit with a message without a GPU to measure."""
    parser.epilog, smoke = _NOTES, "tiny sizes, also on a CPU: does it run?"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: needs a CUDA GPU; none found (--smoke tries the script out on a CPU)\n")
    if "shapes" in args:
        choose(args)
    return args, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(results: Report, work: Iterable[tuple[str, str, Callable[[], object]]]) -> int:
    """Do the work, in which a failure is reported and stops nothing, and write the results; 0 where there are any.

    work: (what is left out where it fails, where that is, what to do).
    """
    try:
        for name, where, do in work:
            results.attempt(name, where, do)
            gc.collect()
            if results.device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        results.write(Path(results.arguments["out"]))
    return 0 if results.rows else 1


def run_jobs(name: str, args: argparse.Namespace, device: torch.device, jobs: Sequence[Job], peers: Sequence[str]):
    if not jobs:
        sys.exit(f"{name}: nothing to measure; these options exclude each other")
    columns = [*jobs[0].labels, *_COLUMNS["flops" if jobs[0].flops else "bytes"], *(f"x {name}" for name in peers)]
    return measure_jobs(Report(name, device, columns, vars(args)), jobs, peers)


def measure_jobs(results: Report, jobs: Iterable[Job], peers: Sequence[str]) -> int:
    """Measure the ceilings, then each job once, together with these peers."""
    results.measure_ceilings()
    # Shapes may differ in what a job does not read.
    once = {job.where: job for job in jobs}
    return run(results, (("all", where, partial(measure, job, peers, results)) for where, job in once.items()))


def by_backend(
    op, arguments: tuple, named: Sequence[str] | None, run_on: Callable[[Backend], Callable]
) -> dict[str, Callable | str]:
    """`ours` of a job: each backend of the operation; the reference if it is named, or if no other backend can run.

    arguments: of the operation, by which its backends say whether they can compute them. named: backends, if any are.
    """
    reasons: dict[Backend, str | None] = {}
    for row in op.table:
        # Of several rows of a backend one is enough.
        if reasons.get(row.backend, "") is not None:
            reasons[row.backend] = row.reason(arguments)
    able = [x for x, why in reasons.items() if why is None and x is not Backend.REFERENCE] or [Backend.REFERENCE]
    return {
        backend.value: run_on(backend) if why is None else why
        for backend, why in reasons.items()
        if (backend.value in named if named else backend in able or why is not None)
    }


def measure(job: Job, names: Sequence[str], results: Report) -> None:
    """Check one job and its peers of these names, time them turn by turn, and add a row for each way of ours."""
    sets = input_sets(job.make, results.device, job.nbytes)
    runs, errors = {}, {}

    def prepare(name: str, peer: Peer, ours: bool) -> None:
        arguments = [peer.prepare(*inputs) for inputs in sets]
        # What accumulates has a separate place for the check.
        checked = peer.prepare(*sets[0])
        out = peer.run(*checked)
        errors[name] = job.check(peer.finish(checked[-1] if out is None else out), sets[0], None if ours else peer)
        runs[name] = peer.run, arguments

    for name, run in job.ours(sets[0]).items():
        if isinstance(run, str):
            results.leave_out(name, job.where, run)
        else:
            results.attempt(name, job.where, prepare, name, Peer(run), True)
    others = {f"peer {name}": job.peers[name] for name in names if name in job.peers}
    for name, find in others.items():
        peer = results.attempt(name, job.where, find)
        if peer is not None:
            results.attempt(name, job.where, prepare, name, peer, False)
    good = _believed(job, time_runs(runs, results.device), results)
    found = {name.removeprefix("peer "): good[name] for name in others if name in good}
    floor = results.ceilings.floor_us(job.nbytes, job.flops)
    for name, t in good.items():
        if name in others:
            continue
        rate = {"MiB": job.nbytes / 2**20, "TB/s": job.nbytes / t.us / 1e6}
        if job.flops:
            rate = {"TFLOP/s": job.flops / t.us / 1e6}
        row = {
            "by": name,
            **job.labels,
            **rate,
            **t.columns(),
            "roofline us": floor,
            "of roofline": floor / t.us,
            **ratios(t.us, {name: other.us for name, other in found.items()}),
            **job.more,
            "peers us": {name: other.us for name, other in found.items()},
        }
        if job.flops:
            row |= {"error": errors[name], "peers TFLOP/s": {n: job.flops / o.us / 1e6 for n, o in found.items()}}
        results.add(row)


def _believed(job: Job, times: Mapping[str, Timing | str], results: Report) -> dict[str, Timing]:
    fastest = job.flops / (_TOO_FAST * max(results.ceilings.fp8, results.ceilings.bf16) * 1e6)
    good = {}
    for name, t in times.items():
        if isinstance(t, str):
            results.leave_out(name, job.where, t)
        elif t.us < fastest and results.device.type == "cuda":
            why = f"not believed: {t.us:.3g} us are above {_TOO_FAST} times the measured peak"
            results.leave_out(name, job.where, why)
        else:
            good[name] = t
    return good


def ratios(us: float, peers: Mapping[str, float]) -> dict[str, float]:
    return {f"x {name}": other / us for name, other in peers.items()}
