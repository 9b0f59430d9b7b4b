"""Quantisers against the bytes that they must move.

For each shape: rowwise, columnwise, both, a weight in square blocks, and the transpose that makes its columnwise copy.
Checks first that bits are the reference's. Bytes that must move: the input read once (twice where the scale of the
tensor must be known first), the payload and scales written. Floor: those over the copy bandwidth measured here.
Writes benchmarks/results/quantize_<device>.json, .md and .png.

    python benchmarks/bench_quantize.py [--shapes 16384x4096x4096 deepseek_v3_671b] [--only both transpose] [--peers]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import peers
import report
import torch
from products import RECIPES
from report import Report
from timing import Timing, input_sets, reason, time_runs

from torchao_blockwise import ops
from torchao_blockwise.formats import BlockFormat

CASES = ("rowwise", "columnwise", "both", "weight", "transpose")
PEERS = ("torchao",)
COLUMNS = ("case", "shape", "by", "us", "spread %", "MiB", "TB/s", "roofline us", "of roofline")
# torchao's kernels compile and try 45 variants for each new width of activations, some 20 seconds.
ACTIVATIONS_WITH_PEERS = ((4096, 7168), (16384, 4096))


class Job(NamedTuple):
    """One thing to time: `make` gives fresh arguments of `run`, `expected` what it must return."""

    case: str
    rows: int
    columns: int
    fmt: BlockFormat
    make: Callable[[], tuple]
    run: Callable
    expected: Callable

    @property
    def nbytes(self) -> int:
        """Bytes that must move."""
        copies = self.fmt.nbytes(self.rows, self.columns)
        if self.case == "transpose":
            return 2 * copies
        written = copies + self.fmt.nbytes(self.columns, self.rows) if self.case == "both" else copies
        if self.case == "columnwise":
            written = self.fmt.nbytes(self.columns, self.rows)
        reads = 2 if self.fmt.has_global_scale else 1
        return reads * self.rows * self.columns * torch.bfloat16.itemsize + written


def job(case: str, rows: int, columns: int, recipe: str, device: torch.device) -> Job:
    """The job of that name for [rows, columns]."""
    fmt = RECIPES[recipe][case in ("weight", "transpose")]

    def random():
        return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16),)

    if case == "transpose":

        def quantized():
            return (ops.quantize(*random(), fmt).rowwise,)

        def transpose(x, backend=None):
            return ops.transpose(x, columns=columns, backend=backend)

        return Job(case, rows, columns, fmt, quantized, transpose, lambda x: transpose(x, backend="reference"))
    # Padded, as layers ask for it.
    options = {"rowwise": case != "columnwise", "columnwise": case in ("columnwise", "both"), "padded": True}

    def quantize(x, backend=None):
        return ops.quantize(x, fmt, **options, backend=backend)

    return Job(case, rows, columns, fmt, random, quantize, lambda x: quantize(x, backend="reference"))


def same_bits(got, expected) -> bool:
    """Whether two nested tuples of tensors and names hold the same bits; NaN by its bits."""
    if isinstance(got, torch.Tensor):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        # A scalar has no bytes to look at.
        a, b = (x.reshape(-1).contiguous().view(torch.uint8) for x in (got, expected))
        return torch.equal(a, b)
    if isinstance(got, (str, type(None))) or isinstance(expected, (str, type(None))):
        return got == expected
    return len(got) == len(expected) and all(map(same_bits, got, expected))


def payload_agrees(peer, ours) -> bool:
    """Whether a peer's first payload lies in memory as ours does, but for a byte in a thousand."""
    theirs, ours = _first(peer), _first(ours)
    theirs = theirs if theirs.is_contiguous() else theirs.t()
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    return bool((theirs.view(torch.uint8) != ours.view(torch.uint8)).float().mean() < 1e-3)


def _first(x) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else _first(next(item for item in x if item is not None))


def measure(job: Job, results: Report, with_peers: bool, recipe: str) -> None:
    """Check the job, time it beside its peers, and add its row."""
    device, ceilings, shape = results.device, results.ceilings, f"{job.rows}x{job.columns}"
    label = f"{job.fmt.name} {job.case} {shape}"
    sets = input_sets(job.make, device, job.nbytes)
    if not same_bits(job.run(*sets[0]), job.expected(*sets[0])):
        results.leave_out("ours", label, "WRONG, bits differ from the reference's; not timed")
        return
    runs = {"ours": (job.run, sets)}
    if with_peers:
        try:
            peers.need_capability(device, (8, 9), at_least=True)
            if recipe != "fp8":
                raise peers.Unavailable("compared in FP8 only")
            for name, run in peers.torchao_quantizers(job.case, job.rows, job.columns).items():
                if payload_agrees(run(*sets[0]), job.run(*sets[0])):
                    runs[name] = run, sets
                else:
                    results.leave_out(name, label, "WRONG, its payload is not ours")
        except peers.Unavailable as why:
            results.leave_out("torchao", label, str(why))
        except Exception as error:
            results.leave_out("torchao", label, reason(error))
    times = time_runs(runs, device)
    ours = times.pop("ours")
    for name, t in times.items():
        if isinstance(t, str):
            results.leave_out(name, label, t)
    if isinstance(ours, str):
        results.leave_out("ours", label, ours)
        return
    others = {name: t.us for name, t in times.items() if isinstance(t, Timing)}
    results.add(
        {
            "case": job.case,
            "shape": shape,
            "by": job.fmt.name,
            **report.moved(job.nbytes, ours, ceilings.floor_us(job.nbytes)),
            **report.ratios(ours.us, others),
            "peers us": others,
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.arguments(__doc__, "default", cases=CASES)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["fp8"], help="default fp8")
    args, device = report.parse(parser, argv)
    columns = [*COLUMNS, *(f"x {name}" for name in ("torchao", "torchao rhs"))]
    results = Report("quantize", device, columns, report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    activations = list(dict.fromkeys((s.tokens, s.in_features) for s in args.shapes))
    weights = list(dict.fromkeys((s.out_features, s.in_features) for s in args.shapes))
    for case in args.only:
        for rows, width in weights if case in ("weight", "transpose") else activations:
            for recipe in args.recipes:
                wanted = args.peers is None and ((rows, width) in ACTIVATIONS_WITH_PEERS or case == "weight")
                try:
                    measure(
                        job(case, rows, width, recipe, device),
                        results,
                        wanted or "torchao" in (args.peers or ()),
                        recipe,
                    )
                except Exception as error:
                    results.leave_out("all", f"{case} {rows}x{width}", reason(error))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    title = "Quantisers: bytes that must move over time"
    results.write(args.out, report.bandwidth_picture(results, title, CASES, {"torchao": "torchao, any case"}))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
