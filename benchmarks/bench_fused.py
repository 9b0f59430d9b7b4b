"""Activations that are quantised as they are computed, against the steps one after the other.

For each shape, tokens x out x in: norms of [tokens, in], and SwiGLU with `out` as its hidden dim, gate and up halves of
one tensor. Ours with the statistics of a norm; `both` makes the rowwise and the columnwise copy. Compared with
    torch        torch's operations in bf16, then our quantiser
    two steps    our kernel for the activation, then our quantiser
Checks first that bits are those of the reference's steps, given the statistics, which agree to some ulps. Floor: bytes
that must move over the copy bandwidth measured here; a norm reads its input twice, for the statistics and again.
Writes benchmarks/results/fused_<device>.json, .md and .png.

    python benchmarks/bench_fused.py [--shapes 4096x18432x7168] [--only rms_both swiglu_both] [--peers]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import report
import torch
import torch.nn.functional as F
from bench_quantize import same_bits
from errors import relative_error
from report import Report
from timing import Timing, input_sets, reason, time_runs

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies

FMT = FP8_1X128
COLUMNS = ("case", "shape", "us", "spread %", "MiB", "TB/s", "roofline us", "of roofline")
PEERS = ("torch", "two steps")
# DeepSeek-V3 671B's dense layers, ragged too; Llama 8B's; experts; DeepSeek-V3 16B's, no multiple of 128.
DEFAULT = ("4096x18432x7168", "4097x18432x7168", "16384x14336x4096", "16384x2048x7168", "4096x10944x2048")
_EPS = 1e-6
# ‖difference‖ / ‖ours‖ that torch's steps may have, which round in between: rounding to e4m3 gives 0.03.
_BUDGET = 0.1
_STATISTICS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One activation and the copies made of it.

    make: (rows, columns, device) -> fresh arguments of the functions below, the first of which is what a norm is of.
    fused: (*arguments, options) -> (statistics or None, copies).
    activation: (*arguments, statistics, backend) -> what is quantised, by us; torch_activation: (*arguments), by torch.
    inputs, outputs: how many tensors as wide as the activation are read and quantised. norm: its kind, if it is one.
    """

    make: Callable[..., tuple]
    fused: Callable
    activation: Callable
    torch_activation: Callable
    inputs: int
    outputs: int
    norm: str | None = None


def _norm(kind: str) -> Case:
    def make(rows, columns, device):
        def random(*shape):
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        return random(rows, columns), 1 + 0.1 * random(columns), 0.1 * random(columns) if kind == "layer" else None

    def fused(x, weight, bias, options):
        statistics = ops.norm_statistics(x, kind, _EPS)
        return statistics, ops.norm_quantize(x, options, statistics, weight, bias)

    def activation(x, weight, bias, statistics=None, backend=None):
        statistics = statistics or ops.norm_statistics(x, kind, _EPS, backend=backend)
        return ops.normalize(x, statistics, weight, bias, backend=backend)

    def by_torch(x, weight, bias):
        if kind == "layer":
            return F.layer_norm(x, x.shape[1:], weight, bias, _EPS)
        return F.rms_norm(x, x.shape[1:], weight, _EPS)

    return Case(make, fused, activation, by_torch, inputs=1, outputs=1, norm=kind)


def _gate_up(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Halves of one tensor, as a merged projection gives them."""
    return torch.randn(rows, 2 * columns, device=device, dtype=torch.bfloat16).chunk(2, 1)


def _swiglu() -> Case:
    return Case(
        _gate_up,
        lambda gate, up, options: (None, ops.swiglu_quantize(gate, up, options)),
        lambda gate, up, statistics=None, backend=None: ops.swiglu(gate, up, backend=backend),
        lambda gate, up: F.silu(gate) * up,
        inputs=2,
        outputs=1,
    )


def _swiglu_backward() -> Case:
    def make(rows, columns, device):
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16), *_gate_up(rows, columns, device)

    def activation(dh, gate, up, statistics=None, backend=None):
        return torch.cat(ops.swiglu_backward(dh, gate, up, backend=backend), 1)

    def by_torch(dh, gate, up):
        return torch.cat((torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)), 1)

    def fused(dh, gate, up, options):
        return None, ops.swiglu_backward_quantize(dh, gate, up, options)

    return Case(make, fused, activation, by_torch, inputs=3, outputs=2)


ACTIVATIONS = {
    "rms": _norm("rms"), "layer": _norm("layer"), "swiglu": _swiglu(), "swiglu_backward": _swiglu_backward(),
}  # fmt: skip
# Padded, as layers ask for it.
COPIES = {"rowwise": CastOptions(FMT, padded=True), "both": CastOptions(FMT, columnwise=True, padded=True)}
CASES = tuple(f"{name}_{copies}" for name in ACTIVATIONS for copies in COPIES)


class Job:
    """One case at [rows, columns] of its activation."""

    def __init__(self, name: str, rows: int, columns: int, device: torch.device):
        activation, copies = name.rsplit("_", 1)
        self.name, self.rows, self.columns, self.device = name, rows, columns, device
        self.case, self.options = ACTIVATIONS[activation], COPIES[copies]

    @property
    def nbytes(self) -> int:
        """Bytes that must move; of a norm without its weights and statistics, some numbers a row or column."""
        width = self.case.outputs * self.columns
        written = FMT.nbytes(self.rows, width)
        if self.options.columnwise:
            written += FMT.nbytes(width, self.rows)
        reads = (2 if self.case.norm else 1) * self.case.inputs
        return reads * self.rows * self.columns * torch.bfloat16.itemsize + written

    def make(self) -> tuple:
        return self.case.make(self.rows, self.columns, self.device)

    def run(self, *arguments):
        """(statistics or None, copies) in as few passes as there are."""
        return self.case.fused(*arguments, self.options)

    def run_torch(self, *arguments):
        return ops.quantize_by(self.case.torch_activation(*arguments), self.options)

    def run_two_steps(self, *arguments):
        return ops.quantize_by(self.case.activation(*arguments), self.options)

    def wrong(self, *arguments) -> str | None:
        """What is not as the reference has it."""
        statistics, copies = self.run(*arguments)
        if self.case.norm:
            expected = ops.norm_statistics(arguments[0], self.case.norm, _EPS, backend="reference")
            for ours, theirs in zip(statistics, expected, strict=True):
                if ours is not None and relative_error(ours, theirs) > _STATISTICS_TOLERANCE:
                    return "statistics differ from the reference's"
        y = self.case.activation(*arguments, statistics=statistics, backend="reference")
        if not same_bits(copies, ops.quantize_by(y, self.options, backend="reference")):
            return "bits differ from the reference's"
        return None


def _decoded(copies: Copies) -> torch.Tensor:
    return ops.dequantize(copies.rowwise, dtype=torch.float32)


def measure(job: Job, names: Sequence[str], results: Report) -> None:
    """Check the job, time it beside its steps, and add its row."""
    device, shape = results.device, f"{job.rows}x{job.columns}"
    where = f"{job.name} {shape}"
    sets = input_sets(job.make, device, job.nbytes)
    if why := job.wrong(*sets[0]):
        results.leave_out("ours", where, f"WRONG, {why}; not timed")
        return
    runs = {"ours": (job.run, sets)}
    ours = _decoded(job.run(*sets[0])[1])
    for name, run in {"torch": job.run_torch, "two steps": job.run_two_steps}.items():
        if name not in names:
            continue
        try:
            error = relative_error(_decoded(run(*sets[0])), ours)
        except Exception as failure:
            results.leave_out(name, where, reason(failure))
        else:
            if error <= _BUDGET:
                runs[name] = run, sets
            else:
                results.leave_out(name, where, f"WRONG, relative error {error:.2g}")
    del ours
    times = time_runs(runs, device)
    for name, t in times.items():
        if isinstance(t, str):
            results.leave_out(name, where, t)
    us = {name: t.us for name, t in times.items() if isinstance(t, Timing)}
    if "ours" not in us:
        return
    others = {name: other for name, other in us.items() if name != "ours"}
    results.add(
        {
            "case": job.name,
            "shape": shape,
            **report.moved(job.nbytes, times["ours"], results.ceilings.floor_us(job.nbytes)),
            **report.ratios(us["ours"], others),
            "peers us": others,
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.arguments(__doc__, "default", cases=CASES)
    parser.set_defaults(shapes=list(DEFAULT))
    args, device = report.parse(parser, argv)
    names = PEERS if args.peers is None else args.peers
    if unknown := set(names) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; the peers are {', '.join(PEERS)}")
    results = Report("fused", device, [*COLUMNS, *(f"x {name}" for name in names)], report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    norms = list(dict.fromkeys((s.tokens, s.in_features) for s in args.shapes))
    hidden = list(dict.fromkeys((s.tokens, s.out_features) for s in args.shapes))
    for case in args.only:
        for rows, width in hidden if case.startswith("swiglu") else norms:
            try:
                measure(Job(case, rows, width, device), names, results)
            except Exception as error:
                results.leave_out("all", f"{case} {rows}x{width}", reason(error))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    title = "Activations with their quantisers: bytes that must move in one pass over time"
    results.write(args.out, report.bandwidth_picture(results, title, CASES, {name: name for name in PEERS}))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
