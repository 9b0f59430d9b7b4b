"""Quantizers against the bytes that they must move.

For each shape: rowwise, columnwise, both, a weight in square blocks, and the transpose that makes its columnwise copy.
fp8_128x128: an input with `grad_weight_blocks` of that name, whose columnwise copy is in square blocks.
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

CASES = ("rowwise", "columnwise", "both", "weight", "transpose")


def job(case: str, rows: int, columns: int, recipe: str, device: torch.device) -> Job:
    activations, weights, of_columns = RECIPES[recipe]
    fmt = weights if case in ("weight", "transpose") else activations
    rowwise, columnwise = fmt.nbytes(rows, columns), of_columns.nbytes(columns, rows)
    with_columns, with_rows = case in ("columnwise", "both"), case != "columnwise"
    written = columnwise * with_columns + rowwise * with_rows
    read = (2 if fmt.has_global_scale else 1) * rows * columns * torch.bfloat16.itemsize
    # Padded, as layers ask for it.
    options = {"rowwise": with_rows, "columnwise": with_columns and of_columns, "padded": True}

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
        # With square blocks for the input, all else is the same as in fp8.
        if recipe != "fp8_128x128" or case in ("columnwise", "both")
    ]
    return driver.run_jobs("quantize", args, device, jobs, args.peers)


if __name__ == "__main__":
    sys.exit(main())
