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
from functools import partial

import driver
import peers
import shapes
import torch
from driver import Job
from errors import Unavailable
from products import KINDS, RECIPES, Product, check, error_budget, product_error
from report import Report
from shapes import Shape

from torchao_blockwise import ops
from torchao_blockwise.formats import Operand
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


def job(kind: str, shape: Shape, recipe: str, device: torch.device, backends=None, every_peer: bool = True) -> Job:
    """One product of a layer. every_peer: also those that compile for long, at every shape."""
    product = Product(kind, *shape, recipe)

    def make():
        hp = product.high_precision(device)
        return *hp, *operands(product, *hp)

    def run_on(backend):
        return lambda a_hp, b_hp, a, b: ops.matmul(a, b, out_dtype=torch.bfloat16, backend=backend)

    def peer(name: str):
        if not every_peer and shape not in _SLOW_PEERS.get(name, [shape]):
            raise Unavailable("compiles for long; name it with --peers")
        return peers.product_peer(name, product, device)

    return Job(
        {"product": kind, "shape": str(shape), "recipe": recipe},
        make,
        lambda inputs: driver.by_backend(matmul_op, (*inputs[2:], torch.bfloat16, None), backends, run_on),
        lambda out, inputs, peer: check(product_error(out, *inputs[2:]), error_budget(product.mnk[2]), recipe, peer),
        {name: partial(peer, name) for name in peers.PRODUCTS},
        product.nbytes(),
        product.flops,
        {"mnk": list(product.mnk), "layers": shapes.name_of(shape)},
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__, only=(KINDS, KINDS), recipes=(RECIPES, ("fp8",)))
    shapes.add_arguments(parser)
    driver.add_backends(parser)
    driver.add_peers(parser, peers.PRODUCTS)
    driver.add_energy(parser)
    args, device = driver.parse(parser, argv)
    args.shapes = shapes.chosen(args, ["default"])
    results = Report("matmul", device, COLUMNS, vars(args))
    jobs = [
        job(*of, device, args.backends, args.peers is not None)
        for of in itertools.product(args.only, args.shapes, args.recipes)
    ]
    title = "Products of a linear layer: " + ", ".join(args.only)
    return driver.run_jobs(results, jobs, title, ["by"], peers.PRODUCTS, slow=_SLOW_PEERS)


if __name__ == "__main__":
    sys.exit(main())
