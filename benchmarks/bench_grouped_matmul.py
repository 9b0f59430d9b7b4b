"""The grouped GEMMs of a mixture's experts, each backend of ours compared with its peers, under several routings.

GEMMs, each of all experts of one GPU together, for the weights [E, out, in] of both layers of their MLPs:
    output, grad_input     groups of rows: x · wᵀ, dy · w
    grad_weight            groups of the contraction: dyᵀ · x for each expert, from quantized operands
    grad_weight_quantized  the same from bf16 dy and x: both columnwise quantizers and the GEMM
The result of each expert is checked against the fp64 GEMM of the decoded operands, 128 rows at a time. Only experts
with tokens count in rooflines. DeepGEMM compiles for long and runs where --peers names it.

    python benchmarks/bench_grouped_matmul.py [--shapes mixtral_8x7b 16384x8x1408x2048] [--routings skewed]
                                              [--only grad_weight] [--backends triton gluon] [--peers bf16]
                                              [--recipes fp8 fp8_128x128]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from common import driver, peers, shapes
from common.driver import Job, Peer
from common.errors import Unavailable
from common.products import RECIPES, Product, check, decoded, error_budget, product_error
from common.shapes import ROUTINGS, Experts, group_ends

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, Groups, Operand
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op
from torchao_blockwise.ops.groups.ends import padded_ends, padded_rows

KINDS = ("output", "grad_input", "grad_weight", "grad_weight_quantized")
PEERS = ("bf16", "deep_gemm")


@dataclass(frozen=True)
class GroupedProduct(Product):
    """One grouped GEMM of experts with weights [experts, out_features, in_features]. sizes: tokens of each expert."""

    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str, sizes: tuple[int, ...], out_features: int, in_features: int, recipe: str = "fp8"):
        return cls(kind, sum(sizes), out_features, in_features, recipe, sizes)

    def ends(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.sizes).cumsum(0).to(device, torch.int32)

    @property
    def along(self) -> str:
        return "k" if self.kind.startswith("grad_weight") else "m"

    @property
    def quantizes(self) -> bool:
        return self.kind == "grad_weight_quantized"

    def nbytes(self) -> int:
        """Bytes that must move: the operands of experts that have tokens, and the whole result, in bf16."""
        t, n, k = self.tokens, self.out_features, self.in_features
        a_fmt, b_fmt = self.formats
        weights, size = sum(size > 0 for size in self.sizes), torch.bfloat16.itemsize
        if self.along == "m":
            contraction, out = (k, n) if self.kind == "output" else (n, k)
            return a_fmt.nbytes(t, contraction) + weights * b_fmt.nbytes(n, k) + t * out * size
        read = (n + k) * t * size if self.quantizes else a_fmt.nbytes(n, t) + b_fmt.nbytes(k, t)
        return read + len(self.sizes) * n * k * size

    def high_precision(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh random bf16 tensors: x or dy, and the weights or x."""
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        t, n, k = self.tokens, self.out_features, self.in_features
        first = random(t, k if self.kind == "output" else n)
        return first, random(len(self.sizes), n, k) if self.along == "m" else random(t, k)

    def quantize(self, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> tuple[Operand, Operand]:
        a_fmt, b_fmt = self.formats
        if self.along == "k":
            a, b = (
                ops.quantize(x, a_fmt, groups=ends, rowwise=False, columnwise=fmt)
                for x, fmt in ((first, a_fmt), (second, b_fmt))
            )
            return a.columnwise, b.columnwise
        transposed = self.kind == "grad_input"
        weights = ops.quantize(second, b_fmt, rowwise=not transposed, columnwise=transposed)
        return ops.quantize(first, a_fmt).rowwise, weights.columnwise if transposed else weights.rowwise

    def error(self, out: torch.Tensor, a: Operand, b: Operand) -> float:
        # Along k, each group is padded with zeros to whole blocks.
        block = a.format.block[1] if self.along == "k" else 1
        sizes = [-(-size // block) * block for size in self.sizes]
        if self.along == "m":
            weights = (decoded(b._replace(qdata=b.qdata[g], scale=b.scale[g])) for g in range(len(sizes)))
            groups = zip(out.split(sizes), decoded(a).split(sizes), weights)
        else:
            groups = zip(out, *(decoded(x)[:, : sum(sizes)].split(sizes, 1) for x in (a, b)))
        return max(product_error(*group) for group in groups)


def grouped_peer(name: str, product: GroupedProduct, device: torch.device) -> Peer:
    """The peer of that name, which prepares (a_hp, b_hp, ends, a, b), both ours too; raises Unavailable."""
    if name != "bf16" and product.recipe != "fp8":
        raise Unavailable("compared in FP8 only")
    return {"bf16": _bf16, "deep_gemm": _deep_gemm}[name](product, device)


def _bf16(product: GroupedProduct, device: torch.device) -> Peer:
    def prepare(a_hp, b_hp, ends, a, b):
        return a_hp.t() if product.along == "k" else a_hp, b_hp.mT if product.kind == "output" else b_hp, ends

    return Peer(lambda a, b, ends: F.grouped_mm(a, b, offs=ends), prepare)


def _deep_gemm(product: GroupedProduct, device: torch.device) -> Peer:
    """Groups padded to its tiles, scales laid out and sizes known beforehand."""
    peers.need_capability(device, (9, 0))
    if product.along == "k":
        raise Unavailable("compared along rows only")
    deep_gemm = peers.import_deep_gemm(device)
    peers.need_multiples("features", (product.out_features, product.in_features), FP8_1X128.block[1])
    tile = deep_gemm.get_mk_alignment_for_contiguous_layout()

    def prepare(a_hp, b_hp, ends, a, b):
        tokens = a.qdata.shape[0]
        rows = padded_rows(ends, tokens, tile)
        source = rows.clamp(max=tokens - 1)
        position = torch.arange(len(rows), dtype=torch.int32, device=device)
        group = torch.searchsorted(padded_ends(ends, tokens, tile), position, right=True, out_int32=True)
        group = torch.where(group < len(ends), group, -1)
        payload = a.qdata.view(torch.uint8)[source].view(a.qdata.dtype)
        return payload, a.scale[:, source].t(), b.qdata, b.scale, group

    def run(a, a_scale, b, b_scale, group):
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, group)
        return out

    def finish(out):
        rows = padded_rows(product.ends(device), product.tokens, tile)
        return out.new_zeros(product.tokens + 1, out.shape[1]).index_copy_(0, rows, out)[: product.tokens]

    return Peer(run, prepare, same_operands=True, finish=finish)


def job(product: GroupedProduct, labels: dict[str, str], device: torch.device, backends=None) -> Job:
    def make():
        first, second = product.high_precision(device)
        ends = product.ends(device)
        return first, second, ends, *product.quantize(first, second, ends)

    def run_on(backend):
        def run(first, second, ends, a, b):
            if product.quantizes:
                a, b = product.quantize(first, second, ends)
            return ops.grouped_matmul(a, b, ends, along=product.along, out_dtype=torch.bfloat16, backend=backend)

        return run

    def ours(inputs):
        *_, ends, a, b = inputs
        of = a, b, Groups(ends), product.along, torch.bfloat16
        return driver.by_backend(grouped_matmul_op, of, backends, run_on)

    contraction = product.in_features if product.kind == "output" else product.out_features
    budget = error_budget(contraction if product.along == "m" else max(product.sizes))
    return Job(
        {"product": product.kind, **labels, "recipe": product.recipe},
        make,
        ours,
        lambda out, inputs, peer: check(product.error(out, *inputs[3:]), budget, product.recipe, peer),
        {name: partial(grouped_peer, name, product, device) for name in PEERS},
        product.nbytes(),
        product.flops,
    )


def jobs_of(shape: Experts, routing: str, kind: str, recipe: str, device: torch.device, backends) -> Iterator[Job]:
    """Of both weights."""
    ends = [0, *group_ends(routing, shape.tokens, shape.experts, torch.device("cpu")).tolist()]
    sizes = tuple(end - start for start, end in itertools.pairwise(ends))
    for weight, (_, n, k) in shape.weights.items():
        labels = {"shape": str(shape), "weight": weight, "routing": routing}
        yield job(GroupedProduct.of(kind, sizes, n, k, recipe), labels, device, backends)


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"only": (KINDS, KINDS), "recipes": (RECIPES, ("fp8",)), "peers": (PEERS, PEERS[:1])}
    parser = driver.parser(__doc__, (shapes.MIXTURES, "large"), **choices)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default all")
    driver.add_backends(parser)
    args, device = driver.parse(parser, argv)
    jobs = [
        job
        for kind, shape, routing, recipe in itertools.product(args.only, args.shapes, args.routings, args.recipes)
        for job in jobs_of(shape, routing, kind, recipe, device, args.backends)
    ]
    return driver.run_jobs("grouped_matmul", args, device, jobs, args.peers)


if __name__ == "__main__":
    sys.exit(main())
