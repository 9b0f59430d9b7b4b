"""Activations that are quantized as they are computed, against the steps one after the other.

For each shape, tokens x out x in: norms of [tokens, in], and SwiGLU with `out` as its hidden dim, gate and up halves of
one tensor. Ours with the statistics of a norm; `both` makes the rowwise and the columnwise copy. Compared with
    torch        torch's operations in bf16, then our quantizer
    two steps    our kernel for the activation, then our quantizer
Checks first that bits are those of the reference's steps, given the statistics, which agree to some ulps. Floor: bytes
that must move over the copy bandwidth measured here; a norm reads its input twice, for the statistics and again.
Writes benchmarks/results/fused_<device>.json, .md and .png.

    python benchmarks/bench_fused.py [--shapes 4096x18432x7168] [--only rms_both swiglu_both] [--peers]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import driver
import errors
import shapes
import torch
import torch.nn.functional as F
from bench_quantize import same_bits
from driver import Job, Peer
from errors import Wrong, relative_error
from report import Report

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, CastOptions

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
    activation: (*arguments, statistics, backend) -> what is quantized, by us; torch_activation: (*arguments), by torch.
    inputs, outputs: how many tensors as wide as the activation are read and quantized. norm: its kind, if it is one.
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


def job(name: str, rows: int, columns: int, device: torch.device) -> Job:
    """One case at [rows, columns] of its activation."""
    activation, copies = name.rsplit("_", 1)
    case, options = ACTIVATIONS[activation], COPIES[copies]
    width = case.outputs * columns
    written = FMT.nbytes(rows, width) + (FMT.nbytes(width, rows) if options.columnwise else 0)
    # Of a norm without its weights and statistics, some numbers a row or column.
    reads = (2 if case.norm else 1) * case.inputs

    def run(*inputs):
        """(statistics or None, copies) in as few passes as there are."""
        return case.fused(*inputs, options)

    def run_torch(*inputs):
        return None, ops.quantize_by(case.torch_activation(*inputs), options)

    def run_two_steps(*inputs):
        return None, ops.quantize_by(case.activation(*inputs), options)

    def decoded(out):
        return ops.dequantize(out[1].rowwise, dtype=torch.float32)

    def check(out, inputs, peer):
        if peer is not None:
            errors.check(relative_error(decoded(out), decoded(run(*inputs))), _BUDGET)
            return
        statistics, copies = out
        if case.norm:
            expected = ops.norm_statistics(inputs[0], case.norm, _EPS, backend="reference")
            for ours, theirs in zip(statistics, expected, strict=True):
                if ours is not None and relative_error(ours, theirs) > _STATISTICS_TOLERANCE:
                    raise Wrong("statistics differ from the reference's; not timed")
        y = case.activation(*inputs, statistics=statistics, backend="reference")
        if not same_bits(copies, ops.quantize_by(y, options, backend="reference")):
            raise Wrong("bits differ from the reference's; not timed")

    return Job(
        {"case": name, "shape": f"{rows}x{columns}"},
        lambda: case.make(rows, columns, device),
        lambda inputs: {"ours": run},
        check,
        {"torch": partial(Peer, run_torch), "two steps": partial(Peer, run_two_steps)},
        reads * rows * columns * torch.bfloat16.itemsize + written,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__, only=(CASES, CASES))
    shapes.add_arguments(parser)
    driver.add_peers(parser, PEERS)
    args, device = driver.parse(parser, argv)
    args.shapes = shapes.chosen(args, DEFAULT)
    results = Report("fused", device, COLUMNS, vars(args))
    jobs = [
        job(case, shape.tokens, shape.out_features if case.startswith("swiglu") else shape.in_features, device)
        for case, shape in itertools.product(args.only, args.shapes)
    ]
    title = "Activations with their quantizers: bytes that must move in one pass over time"
    return driver.run_jobs(results, jobs, title, ["case"], PEERS)


if __name__ == "__main__":
    sys.exit(main())
