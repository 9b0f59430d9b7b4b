"""The GEMMs of a linear layer, as what is to be checked and timed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from common import errors
from common.driver import Peer
from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, BlockFormat, Operand

# Recipe -> formats of activations and gradients, of weights, and of the input in grad_weight.
RECIPES: dict[str, tuple[BlockFormat, BlockFormat, BlockFormat]] = {
    "fp8": (FP8_1X128, FP8_128X128, FP8_1X128),
    "fp8_128x128": (FP8_1X128, FP8_128X128, FP8_128X128),
    "nvfp4": (NVFP4_1X16, NVFP4_16X16, NVFP4_1X16),
}
KINDS = ("output", "grad_input", "grad_weight")
# Peers that quantize in their own way, or not at all, are as far off as our quantization is.
_OTHERS_BUDGET = {"fp8": 0.1, "fp8_128x128": 0.1, "nvfp4": 0.25}
# Rows of a result that are checked at a time.
_ROWS = 128


@dataclass(frozen=True)
class Product:
    """One of the three GEMMs of a linear layer: a[m, k] · b[n, k]ᵀ.

    kind: "output" x · wᵀ, "grad_input" dy · w or "grad_weight" dyᵀ · x.
    tokens: rows of x [tokens, in_features] and dy [tokens, out_features]; w is [out_features, in_features].
    recipe: of RECIPES.
    """

    kind: str
    tokens: int
    out_features: int
    in_features: int
    recipe: str = "fp8"

    @property
    def mnk(self) -> tuple[int, int, int]:
        t, n, k = self.tokens, self.out_features, self.in_features
        return {"output": (t, n, k), "grad_input": (t, k, n), "grad_weight": (n, k, t)}[self.kind]

    @property
    def formats(self) -> tuple[BlockFormat, BlockFormat]:
        activations, weights, of_input = RECIPES[self.recipe]
        return activations, of_input if self.kind.startswith("grad_weight") else weights

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.out_features * self.in_features

    def nbytes(self) -> int:
        """Bytes that must move: both operands read, the result written in bf16."""
        m, n, k = self.mnk
        a_fmt, b_fmt = self.formats
        return a_fmt.nbytes(m, k) + b_fmt.nbytes(n, k) + m * n * torch.bfloat16.itemsize

    def make(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Operand, Operand]:
        """Fresh random a [m, k] and b [n, k] in bf16, some views of transposes, and both as layers quantize them.

        Operands of grad_weight are columnwise copies, padded with zero tokens.
        """
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        t, n, k = self.tokens, self.out_features, self.in_features
        a_fmt, b_fmt = self.formats
        if self.kind == "grad_weight":
            dy, x = random(t, n), random(t, k)
            both = (
                ops.quantize(y, a_fmt, rowwise=False, columnwise=fmt, padded=True).columnwise
                for y, fmt in ((dy, a_fmt), (x, b_fmt))
            )
            return dy.t(), x.t(), *both
        a, b = (random(t, k), random(n, k)) if self.kind == "output" else (random(t, n), random(n, k).t())
        return a, b, ops.quantize(a, a_fmt).rowwise, ops.quantize(b, b_fmt).rowwise


def product_error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest ‖out - a·bᵀ‖ / ‖a·bᵀ‖ of 128 rows, a and b as `decoded` gives them; inf where `out` has NaN."""
    strips = zip(out.split(_ROWS), a.split(_ROWS), strict=True)
    found = [errors.relative_error(x, y @ b.mT) for x, y in strips]
    return max((error if math.isfinite(error) else math.inf for error in found), default=0.0)


def decoded(x: Operand) -> torch.Tensor:
    return ops.dequantize(x, dtype=torch.float64)


def error_budget(k: int) -> float:
    """The bound that `product_error` of a right result in bf16 over `k` stays below.

    Hopper cuts the sum of 32 e4m3 products off at 14 bits, all in one direction: four cuts of 2^-13 in a block of 128.
    What is cut off adds up as k does, random products as its root: the share grows with √k, from where k hides it no
    more (2048). Then one rounding to bf16.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2.
    """
    return 4 * 2.0**-13 * max(1.0, math.sqrt(k / 2048)) + torch.finfo(torch.bfloat16).eps / 2


def check(error: float, budget: float, recipe: str, peer: Peer | None) -> float:
    """`error` of a GEMM by us or a peer, where it is within `budget`, which is of our operands; raises Wrong."""
    return errors.check(error, budget if peer is None or peer.same_operands else _OTHERS_BUDGET[recipe])
