"""Activations that are quantized as they are computed, compared with our own steps one after the other.

For each shape, tokens x out x in: norms of [tokens, in], and SwiGLU with `out` as its hidden dim, gate and up halves of
one tensor. Ours with the statistics of a norm; `both` makes the rowwise and the columnwise copy. "two steps" are our
kernel for the activation, then our quantizer.
The results are bitwise identical to the reference's steps, given the statistics, which agree to some ulps. A norm
must read its input twice, for the statistics and again.

    python benchmarks/bench_fused.py [--shapes 4096x18432x7168] [--only rms_both swiglu_both]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial

import torch
from common import driver, errors, shapes
from common.driver import Job, Peer
from common.errors import check_bits, relative_error, tensors

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, CastOptions

FMT = FP8_1X128
# DeepSeek-V3 671B's dense layers, ragged too; Llama 8B's; experts; DeepSeek-V3 16B's, no multiple of 128.
DEFAULT = ("4096x18432x7168", "4097x18432x7168", "16384x14336x4096", "16384x2048x7168", "4096x10944x2048")
# Activation -> how many tensors as wide as it are read, and how many are quantized. A norm's input is read twice; its
# weights and statistics, some numbers a row or column, are not counted.
ACTIVATIONS = {"rms": (2, 1), "layer": (2, 1), "swiglu": (2, 1), "swiglu_backward": (3, 2)}
# Padded, as layers ask for it.
COPIES = {copies: CastOptions(FMT, columnwise=copies == "both", padded=True) for copies in ("rowwise", "both")}
CASES = tuple(f"{name}_{copies}" for name in ACTIVATIONS for copies in COPIES)
_EPS, _STATISTICS_TOLERANCE = 1e-6, 1e-5


def make(name: str, rows: int, columns: int, device: torch.device) -> tuple:
    """Fresh arguments of an activation; gate and up are halves of one tensor, as a merged projection gives them."""
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    if name in ("rms", "layer"):
        bias = 0.1 * random(columns) if name == "layer" else None
        return random(rows, columns), 1 + 0.1 * random(columns), bias
    gate_up = random(rows, 2 * columns).chunk(2, 1)
    return gate_up if name == "swiglu" else (random(rows, columns), *gate_up)


def fused(name: str, inputs: tuple, options: CastOptions) -> tuple:
    """(statistics or None, copies) in as few passes as there are."""
    if name in ("rms", "layer"):
        x, weight, bias = inputs
        statistics = ops.norm_statistics(x, name, _EPS)
        return statistics, ops.norm_quantize(ops.Norm(x, weight, bias, *statistics, x.dtype), options)
    return None, getattr(ops, f"{name}_quantize")(*inputs, options)


def activation(name: str, inputs: tuple, statistics=None, backend=None) -> torch.Tensor:
    if name in ("rms", "layer"):
        x, weight, bias = inputs
        statistics = statistics or ops.norm_statistics(x, name, _EPS, backend=backend)
        return ops.normalize(ops.Norm(x, weight, bias, *statistics, x.dtype), backend=backend)
    if name == "swiglu":
        return ops.swiglu(*inputs, backend=backend)
    return torch.cat(ops.swiglu_backward(*inputs, backend=backend), 1)


def job(case: str, rows: int, columns: int, device: torch.device) -> Job:
    name, copies = case.rsplit("_", 1)
    (read, quantized), options = ACTIVATIONS[name], COPIES[copies]
    width = quantized * columns
    written = FMT.nbytes(rows, width) + (FMT.nbytes(width, rows) if options.columnwise else 0)

    def two_steps(*inputs):
        return ops.quantize_by(activation(name, inputs), options)

    def check(out, inputs, peer):
        statistics, copies = (None, out) if peer else out
        if statistics is not None:
            expected = ops.norm_statistics(inputs[0], name, _EPS, backend="reference")
            for ours, theirs in zip(tensors(statistics), tensors(expected), strict=True):
                errors.check(relative_error(ours, theirs), _STATISTICS_TOLERANCE)
        if not peer:
            y = activation(name, inputs, statistics, "reference")
            check_bits(copies, ops.quantize_by(y, options, backend="reference"))

    return Job(
        {"case": case, "shape": f"{rows}x{columns}"},
        partial(make, name, rows, columns, device),
        lambda inputs: {"ours": lambda *inputs: fused(name, inputs, options)},
        check,
        {"two steps": partial(Peer, two_steps)},
        read * rows * columns * torch.bfloat16.itemsize + written,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, device = driver.parse(driver.parser(__doc__, (shapes.LINEAR, DEFAULT), only=(CASES, CASES)), argv)
    jobs = [
        job(case, shape.tokens, shape.out_features if case.startswith("swiglu") else shape.in_features, device)
        for case, shape in itertools.product(args.only, args.shapes)
    ]
    return driver.run_jobs("fused", args, device, jobs, ["two steps"])


if __name__ == "__main__":
    sys.exit(main())
