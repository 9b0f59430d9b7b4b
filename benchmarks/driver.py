"""How benchmarks run: their options, and their jobs one by one, each checked, then timed beside its peers.

A benchmark describes its jobs as data (`Job`); `run` does the rest. What fails is left out with its reason, and the
others go on.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import report
import roofline
import torch
from report import Report
from timing import Timing, input_sets, time_runs

from torchao_blockwise.ops import Backend

# A rate above the measured peak times this is not believed.
_TOO_FAST = 1.5


class Peer(NamedTuple):
    """One way of others to do a job.

    run: (*arguments) -> the result, or None where it is written into its last argument.
    prepare: (*inputs of the job) -> arguments of `run`, out of time.
    same_operands: it multiplies our operands, so that its error is that of accumulation alone.
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
    ours: inputs -> {name: (*inputs) -> the result, or why it cannot run here}; the column `by` has the name.
    check: (result, inputs, peer or None) -> its error, if it has one; raises Wrong.
    peers: name -> what gives the Peer; may raise Unavailable.
    nbytes: that must move. flops: 0 where bytes are all that counts. more: what else its rows hold.
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


def parser(doc: str, **choices: tuple[Sequence[str], Sequence[str]]) -> argparse.ArgumentParser:
    """The options of every benchmark, and one for each of `choices`: name -> (what there is, default)."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (there, default) in choices.items():
        made.add_argument(
            f"--{name}", nargs="+", choices=there, default=list(default), help=f"default {' '.join(default)}"
        )
    made.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU where there is no GPU: does it run?")
    made.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    return made


def add_peers(to: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """--peers, None where all that are quick are meant."""
    to.add_argument("--peers", nargs="*", choices=names, help="only these peers; none where none is named")


def add_backends(to: argparse.ArgumentParser) -> None:
    to.add_argument("--backends", nargs="+", choices=[b.value for b in Backend if b is not Backend.AUTO])


def add_energy(to: argparse.ArgumentParser) -> None:
    to.add_argument("--energy", action="store_true", help="measure joules too, 0.7 s more for each time")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Arguments and the device; leaves with a message where there is no GPU to measure."""
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: needs a CUDA GPU; none found (--smoke tries the script out on a CPU)\n")
    return args, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(
    results: Report, work: Iterable[tuple[Sequence[str], str, Callable[[], object]]], picture: Callable | None = None
) -> int:
    """Do the work, in which a failure is told and kills nothing, and write the results; 0 where there are any.

    work: (who is left out where it fails, where that is, what to do). picture: results -> arguments of `roofline.draw`.
    """
    try:
        for names, where, do in work:
            try:
                do()
            except Exception as error:
                for name in names:
                    results.leave_out(name, where, error)
            if results.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    finally:
        results.write(Path(results.arguments["out"]), picture(results) if picture and results.rows else None)
    return 0 if results.rows else 1


def run_jobs(
    results: Report, jobs: Iterable[Job], title: str, by: Sequence[str], peers: Sequence[str], slow: Container[str] = ()
) -> int:
    """Measure the ceilings, then each job once, beside peers; those that are `slow` to compile come last.

    title, by: of the picture, and the columns whose values make its series. peers: where the command line names none.
    """
    named = results.arguments.get("peers")
    names = peers if named is None else named
    results.columns += [f"x {name}" for name in names]
    results.measure_ceilings()
    # Shapes may differ in what a job does not read.
    once = {job.where: job for job in jobs}
    work = (
        (("all",), where, partial(measure, job, stage, results))
        for stage in in_stages(names, slow)
        for where, job in once.items()
    )
    return run(results, work, lambda results: roofline.picture(results, title, *by))


def in_stages(names: Sequence[str], slow: Container[str]) -> list[list[str]]:
    """Peers in the order in which they are compared with: all that are quick, then each of `slow` alone.

    Every stage runs at every shape before the next begins, the first without peers too, so that a run that is cut short
    has all of ours.
    """
    return [[name for name in names if name not in slow], *([name] for name in names if name in slow)]


def by_backend(
    op, arguments: tuple, named: Sequence[str] | None, run_on: Callable[[Backend], Callable]
) -> dict[str, Callable | str]:
    """Of a job's `ours`: each backend in the operation's table; the reference only where it is named or alone.

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
    """Check and time one job beside these peers, and add a row for each way of ours, or to what is there.

    Peers that run later than ours run beside ours once more, so that a ratio is of the same heat and clocks.
    """
    there = {row.get("by"): row for row in results.rows if job.labels.items() <= row.items()}
    asked = [name for name in names if name in job.peers]
    found = {f"peer {name}": results.attempt(f"peer {name}", job.where, job.peers[name]) for name in asked}
    found = {name: peer for name, peer in found.items() if peer is not None}
    if there and not found:
        return
    sets = input_sets(job.make, results.device, job.nbytes)
    runs, errors = {}, {}

    def prepare(name: str, peer: Peer, ours: bool) -> None:
        arguments = [peer.prepare(*inputs) for inputs in sets]
        # What accumulates has a place of its own for the check.
        checked = peer.prepare(*sets[0])
        out = peer.run(*checked)
        errors[name] = job.check(peer.finish(checked[-1] if out is None else out), sets[0], None if ours else peer)
        runs[name] = peer.run, arguments

    for name, run in job.ours(sets[0]).items():
        if there and name not in there:
            continue
        if isinstance(run, str):
            results.leave_out(name, job.where, run)
        else:
            results.attempt(name, job.where, prepare, name, Peer(run), True)
    for name, peer in found.items():
        results.attempt(name, job.where, prepare, name, peer, False)
    times = time_runs(runs, results.device, with_energy=results.with_energy)
    good = _believed(job, times, results)
    others = {name.removeprefix("peer "): t.us for name, t in good.items() if name in found}
    rates = {name: job.flops / us / 1e6 for name, us in others.items()}
    spent = {name.removeprefix("peer "): t.joules for name, t in good.items() if name in found}
    floor = results.ceilings.floor_us(job.nbytes, job.flops)
    for name, t in good.items():
        if name in found:
            continue
        if name in there:
            row = there[name]
            more = {"peers us": row["peers us"] | others, "peers TFLOP/s": row["peers TFLOP/s"] | rates}
            results.amend(row, ratios(t.us, others) | more)
            continue
        row = {"by": name} if "by" in results.columns else {}
        row |= {**job.labels, **rate(job, t), **timed(t, floor), **ratios(t.us, others), **job.more, "peers us": others}
        row |= {"error": errors[name], "peers TFLOP/s": rates} if job.flops else {}
        results.add(row | ({"J": t.joules, "peers J": spent} if results.with_energy else {}))


def _believed(job: Job, times: Mapping[str, Timing | str], results: Report) -> dict[str, Timing]:
    """The times that were measured and are possible."""
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


def rate(job: Job, t: Timing) -> dict:
    """What was done in this time, and how much of it a second."""
    if job.flops:
        return {"TFLOP/s": job.flops / t.us / 1e6, "intensity": job.flops / job.nbytes}
    return {"MiB": job.nbytes / 2**20, "TB/s": job.nbytes / t.us / 1e6}


def timed(t: Timing, floor: float) -> dict:
    """Columns of a time beside its floor, µs."""
    return {
        "us": t.us,
        "spread %": 100 * (t.high - t.low) / t.us,
        "roofline us": floor,
        "of roofline": floor / t.us,
        "timing": t._asdict(),
    }


def ratios(us: float, peers: Mapping[str, float]) -> dict[str, float]:
    """{"x <peer>": how many times faster than the peer}: peer's µs over `us`."""
    return {f"x {name}": other / us for name, other in peers.items()}
