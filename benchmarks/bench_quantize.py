"""Quantizers against the bytes that they must move.

For each shape: rowwise, columnwise, both, a weight in square blocks, and the transpose that makes its columnwise copy;
in NVFP4 also the columnwise copy of the random Hadamard transform ("transformed"), and both copies of a gradient,
rounded stochastically, the columnwise one transformed ("gradient").
Checks first that bits are the reference's. Bytes that must move: the input read once (twice where the scale of the
tensor must be known first), the payload and scales written. Floor: those over the copy bandwidth measured here.
Writes benchmarks/results/quantize_<device>.json, .md and .png.

    python benchmarks/bench_quantize.py [--shapes 16384x4096x4096 deepseek_v3_671b] [--only both transpose] [--peers]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial

import driver
import peers
import shapes
import torch
from driver import Job
from errors import Unavailable, Wrong
from products import RECIPES
from report import Report

from torchao_blockwise import ops
from torchao_blockwise.formats import CastOptions, Draws, StochasticRounding, hadamard_number, key_of

NVFP4_ONLY = ("transformed", "gradient")
CASES = ("rowwise", "columnwise", "both", "weight", "transpose", *NVFP4_ONLY)
PEERS = ("torchao", "torchao rhs")
COLUMNS = ("case", "shape", "by", "us", "spread %", "MiB", "TB/s", "roofline us", "of roofline")
# torchao's kernels compile and try 45 variants for each new width of activations, some 20 seconds.
ACTIVATIONS_WITH_PEERS = ((4096, 7168), (16384, 4096))


def job(case: str, rows: int, columns: int, recipe: str, device: torch.device, with_peers: bool = False) -> Job:
    """The job of that name for [rows, columns]."""
    fmt = RECIPES[recipe][case in ("weight", "transpose")]
    rowwise, columnwise = fmt.nbytes(rows, columns), fmt.nbytes(columns, rows)
    with_columns = case in ("columnwise", "both", *NVFP4_ONLY)
    alone = case in ("columnwise", "transformed")
    written = columnwise * with_columns + rowwise * (not alone)
    read = (2 if fmt.has_global_scale else 1) * rows * columns * torch.bfloat16.itemsize

    def make():
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        if case.startswith("gradient"):
            return x, key_of(StochasticRounding(seed=1, stream=2, use=3), device)
        return (ops.quantize(x, fmt).rowwise if case == "transpose" else x,)

    def run(x, key=None, backend=None):
        if case == "transpose":
            return ops.transpose(x, columns=columns, backend=backend)
        number = hadamard_number(case.startswith(("transformed", "gradient")))
        # Padded, as layers ask for it.
        options = CastOptions(fmt, not alone, with_columns, False, True, number)
        return ops.quantize_by(x, options, draws=None if key is None else Draws(key), backend=backend)

    def check(out, inputs, peer):
        if peer is None and not same_bits(out, run(*inputs, backend="reference")):
            raise Wrong("bits differ from the reference's; not timed")
        if peer is not None and not payload_agrees(out, run(*inputs)):
            raise Wrong("its payload is not ours")

    def peer(name: str):
        if recipe != "fp8":
            raise Unavailable("compared in FP8 only")
        return peers.torchao_quantizer(name, case, rows, columns, device)

    names = PEERS[: 2 if case == "columnwise" else 1] if with_peers else ()
    return Job(
        {"case": case, "shape": f"{rows}x{columns}", "by": fmt.name},
        make,
        lambda inputs: {"ours": run},
        check,
        {name: partial(peer, name) for name in names},
        2 * rowwise if case == "transpose" else read + written,
    )


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__, only=(CASES, CASES), recipes=(RECIPES, ("fp8",)))
    shapes.add_arguments(parser)
    driver.add_peers(parser, PEERS)
    args, device = driver.parse(parser, argv)
    args.shapes = shapes.chosen(args, ["default"])
    results = Report("quantize", device, COLUMNS, vars(args))
    jobs = []
    for case, shape, recipe in itertools.product(args.only, args.shapes, args.recipes):
        if case in NVFP4_ONLY and recipe != "nvfp4":
            continue
        weight = case in ("weight", "transpose")
        size = shape.out_features if weight else shape.tokens, shape.in_features
        wanted = bool(args.peers) if args.peers is not None else case == "weight" or size in ACTIVATIONS_WITH_PEERS
        jobs.append(job(case, *size, recipe, device, wanted))
    return driver.run_jobs(results, jobs, "Quantizers: bytes that must move over time", ["case"], PEERS)


if __name__ == "__main__":
    sys.exit(main())
