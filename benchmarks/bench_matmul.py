"""The three products of a linear layer, each backend of ours beside its peers.

Checks first: four corners of every product against the fp64 product of what the operands decode to. Times are of CUDA
graph replays with a cold cache. Floor: the greater of bytes that must move over copy bandwidth, and operations over the
rate of cuBLASLt's tensorwise fp8, both measured here. A ratio to a peer is the peer's time over ours: above 1 we win.
Operands are those that layers make: of grad_weight columnwise copies, padded. Peers that compile for long come last.
Writes benchmarks/results/matmul_<device>.json, .md and .png.

    python benchmarks/bench_matmul.py [--shapes 4096x7168x2048 llama_8b] [--tokens 4096] [--only grad_weight]
                                      [--backends gluon cublas] [--peers cublaslt deep_gemm]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import peers
import product_rows
import report
import shapes
import torch
from products import KINDS, RECIPES, Product, error_budget, product_error
from report import Report
from timing import input_sets, reason

from torchao_blockwise import ops
from torchao_blockwise.formats import Operand
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.gemm.plain import matmul_op

COLUMNS = ("product", "shape", "recipe", "by", "us", "spread %", "TFLOP/s", "roofline us", "of roofline", "error")
# Where peers that compile for long are run by default; --peers runs them everywhere. torchao takes six builds for each
# N and K, which are constants of its kernels; DeepGEMM's compiler is slow.
_SLOW_PEERS = {"torchao": (shapes.PEERS[2],), "deep_gemm": shapes.PEERS}


def operands(product: Product, a: torch.Tensor, b: torch.Tensor) -> tuple[Operand, Operand]:
    """Both operands as layers make them: those of grad_weight are columnwise copies, padded with zero tokens."""
    if product.kind != "grad_weight":
        return product.quantize(a, b)

    def columnwise(x, fmt):
        return ops.quantize(x.t(), fmt, rowwise=False, columnwise=True, padded=True).columnwise

    a_fmt, b_fmt = product.formats
    return columnwise(a, a_fmt), columnwise(b, b_fmt)


def measure(product: Product, backends, names: Sequence[str], results: Report) -> None:
    """Check and time one product beside these peers, and add a row for each backend of ours, or to what is there."""
    device, mnk = results.device, product.mnk
    shape = shapes.Shape(product.tokens, product.out_features, product.in_features)

    def run_on(backend):
        return lambda a, b: ops.matmul(a, b, out_dtype=torch.bfloat16, backend=backend)

    def make():
        hp = product.high_precision(device)
        return *hp, *operands(product, *hp)

    def prepare(found):
        sets = input_sets(make, device, product.nbytes())
        a, b = sets[0][2:]
        reasons = product_rows.reasons(matmul_op, a, b, torch.bfloat16, None)
        return product_rows.check(
            sets,
            product_rows.by_backend(reasons, backends, run_on),
            lambda *arguments: arguments[2:],
            found,
            lambda out, peer: product_error(out, a, b),
            error_budget(mnk[2]),
            product.recipe,
        )

    product_rows.measure(
        product,
        {"product": product.kind, "shape": str(shape), "recipe": product.recipe},
        f"{product.kind} {shape}",
        names,
        lambda name: peers.product_peer(name, product, device),
        prepare,
        {"mnk": list(mnk), "layers": shapes.name_of(shape)},
        results,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.arguments(__doc__, "default", cases=KINDS)
    parser.add_argument("--backends", nargs="+", choices=[b.value for b in Backend if b is not Backend.AUTO])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["fp8"], help="default fp8")
    args, device = report.parse(parser, argv)
    names = peers.PRODUCTS if args.peers is None else args.peers
    if unknown := set(names) - set(peers.PRODUCTS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; the peers are {', '.join(peers.PRODUCTS)}")
    columns = [*COLUMNS, *(f"x {name}" for name in names)]
    results = Report("matmul", device, columns, report.plain(vars(args)))
    results.measure_ceilings(smoke=args.smoke)
    stages = report.in_stages(names, _SLOW_PEERS)
    for stage, kind, shape in itertools.product(stages, args.only, args.shapes):
        slow = [n for n in stage if args.peers is None and shape not in _SLOW_PEERS.get(n, [shape])]
        for name in slow:
            results.leave_out(f"peer {name}", f"{kind} {shape}", "compiles for long; name it with --peers")
        wanted = [name for name in stage if name not in slow]
        if not wanted and stage is not stages[0]:
            continue
        for recipe in args.recipes:
            try:
                measure(Product(kind, *shape, recipe), args.backends, wanted, results)
            except Exception as error:
                results.leave_out("all", f"{kind} {shape}", reason(error))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    results.write(args.out, product_rows.picture(results, "Products of a linear layer", "by"))
    return 0 if results.rows else 1


if __name__ == "__main__":
    sys.exit(main())
