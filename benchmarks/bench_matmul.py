"""The three GEMMs of a linear layer, each backend of ours compared with its peers.

Every result is checked against the fp64 GEMM of the decoded operands, 128 rows at a time. Operands are those that
layers make: of grad_weight columnwise copies, padded; of fp8_128x128 with the input in square blocks. DeepGEMM compiles
for long and runs where --peers names it. The results of fp8_128x128 have separate files, matmul_128x128_<device>.

    python benchmarks/bench_matmul.py [--shapes 4096x7168x2048 large] [--only grad_weight] [--backends gluon cublas]
                                      [--peers cublaslt deep_gemm] [--recipes fp8 fp8_128x128]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial

import torch
from common import driver, peers, shapes
from common.driver import Job
from common.products import KINDS, RECIPES, Product, check, decoded, error_budget, product_error
from common.shapes import Shape

from torchao_blockwise import ops
from torchao_blockwise.ops.gemm.plain import matmul_op


def job(kind: str, shape: Shape, recipe: str, device: torch.device, backends: Sequence[str] | None = None) -> Job:
    """One GEMM of a layer; its inputs are both operands in high precision, and quantized."""
    product = Product(kind, *shape, recipe)

    def run_on(backend):
        return lambda a_hp, b_hp, a, b: ops.matmul(a, b, out_dtype=torch.bfloat16, backend=backend)

    return Job(
        {"product": kind, "shape": str(shape), "recipe": recipe},
        partial(product.make, device),
        lambda inputs: driver.by_backend(matmul_op, (*inputs[2:], torch.bfloat16, None), backends, run_on),
        lambda out, inputs, peer: check(
            product_error(out, *map(decoded, inputs[2:])), error_budget(product.mnk[2]), recipe, peer
        ),
        {name: partial(peers.product_peer, name, product, device) for name in peers.PRODUCTS},
        product.nbytes(),
        product.flops,
        {"mnk": list(product.mnk)},
    )


def main(argv: Sequence[str] | None = None) -> int:
    compared = (peers.PRODUCTS, peers.QUICK_PRODUCTS)
    choices = {"only": (KINDS, KINDS), "recipes": (RECIPES, ("fp8",)), "peers": compared}
    parser = driver.parser(__doc__, (shapes.LINEAR, "default"), **choices)
    driver.add_backends(parser)
    args, device = driver.parse(parser, argv)
    jobs = [job(*of, device, args.backends) for of in itertools.product(args.only, args.shapes, args.recipes)]
    name = "matmul_128x128" if "fp8_128x128" in args.recipes else "matmul"
    return driver.run_jobs(name, args, device, jobs, args.peers)


if __name__ == "__main__":
    sys.exit(main())
