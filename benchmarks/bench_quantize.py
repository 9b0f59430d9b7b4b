"""Quantizers against the bytes that they must move.

For each shape: rowwise, columnwise, both, a weight in square blocks, and the transpose that makes its columnwise copy;
in NVFP4 also the columnwise copy of the random Hadamard transform ("transformed"), and both copies of a gradient,
rounded stochastically, the columnwise one transformed ("gradient"). fp8_128x128: an input with `grad_weight_blocks` of
that name, whose columnwise copy is in square blocks.
The results are bitwise identical to the reference's. Bytes that must move: the input read once (twice where the scale
of the tensor must be known first), the payload and scales written.
torchao's kernels, in FP8, compile and try 45 variants for each new width, some 20 seconds: --peers runs them.

    python benchmarks/bench_quantize.py [--shapes 16384x4096x4096 large] [--only both transpose] [--peers torchao]
                                        [--recipes fp8 fp8_128x128]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from common import driver, peers, shapes
from common.driver import Job
from common.errors import Unavailable, Wrong, check_bits, tensors
from common.products import RECIPES

from torchao_blockwise import ops

NVFP4_ONLY = ("transformed", "gradient")
CASES = ("rowwise", "columnwise", "both", "weight", "transpose", *NVFP4_ONLY)


def job(case: str, rows: int, columns: int, recipe: str, device: torch.device) -> Job:
    """The job of that name for [rows, columns]."""
    activations, weights, of_columns = RECIPES[recipe]
    fmt = weights if case in ("weight", "transpose") else activations
    rowwise, columnwise = fmt.nbytes(rows, columns), of_columns.nbytes(columns, rows)
    with_columns = case in ("columnwise", "both", *NVFP4_ONLY)
    with_rows = case not in ("columnwise", "transformed")
    written = columnwise * with_columns + rowwise * with_rows
    read = (2 if fmt.has_global_scale else 1) * rows * columns * torch.bfloat16.itemsize
    # Padded, as layers ask for it.
    options = {
        "rowwise": with_rows, "columnwise": with_columns and of_columns, "padded": True, "hadamard": case in NVFP4_ONLY
    }  # fmt: skip
    if case == "gradient":
        options["stochastic"] = ops.StochasticRounding(seed=1, stream=2, use=3)

    def make():
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        return (ops.quantize(x, fmt).rowwise if case == "transpose" else x,)

    def run(x, backend=None):
        if case == "transpose":
            return ops.transpose(x, columns=columns, backend=backend)
        return ops.quantize(x, fmt, **options, backend=backend)

    def check(out, inputs, peer):
        if peer is None:
            check_bits(out, run(*inputs, backend="reference"))
        elif not payload_agrees(out, run(*inputs)):
            raise Wrong("its payload is not ours")

    def torchao():
        if recipe != "fp8":
            raise Unavailable("compared in FP8 only")
        return peers.torchao_quantizer(case, rows, columns, device)

    return Job(
        {"case": case, "shape": f"{rows}x{columns}", "by": recipe if recipe == "fp8_128x128" else fmt.name},
        make,
        lambda inputs: {"ours": run},
        check,
        {"torchao": torchao},
        2 * rowwise if case == "transpose" else read + written,
    )


def cases_of(recipe: str) -> Sequence[str]:
    """The cases that only this recipe has, and those that all have."""
    if recipe == "fp8_128x128":
        return "columnwise", "both"
    return CASES if recipe == "nvfp4" else CASES[: -len(NVFP4_ONLY)]


def payload_agrees(peer, ours) -> bool:
    """Whether a peer's first payload lies in memory as ours does, except for a byte in a thousand."""
    theirs, ours = next(tensors(peer)), next(tensors(ours))
    theirs = theirs if theirs.is_contiguous() else theirs.t()
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    return bool((theirs.view(torch.uint8) != ours.view(torch.uint8)).float().mean() < 1e-3)


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"only": (CASES, CASES), "recipes": (RECIPES, ("fp8",)), "peers": (["torchao"], ())}
    args, device = driver.parse(driver.parser(__doc__, (shapes.LINEAR, "default"), **choices), argv)
    jobs = [
        job(case, s.out_features if case in ("weight", "transpose") else s.tokens, s.in_features, recipe, device)
        for case, s, recipe in itertools.product(args.only, args.shapes, args.recipes)
        if case in cases_of(recipe)
    ]
    return driver.run_jobs("quantize", args, device, jobs, args.peers)


if __name__ == "__main__":
    sys.exit(main())
