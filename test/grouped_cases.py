"""Groups of tokens and operands of their products, for tests of kernels that no interpreter runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128

# (sizes of the groups, tokens of no group)
ROUTINGS = {
    "ragged": ((70, 1, 200, 65), 0),
    "aligned": ((256, 128), 0),
    "empty": ((0, 130, 0, 0, 64, 0), 0),
    "tail": ((33, 0, 129), 100),
    "all to one": ((0, 0, 300), 0),
    "none to any": ((0, 0), 70),
    "one expert": ((257,), 1),
    "one token": ((0, 1), 0),
    "many experts": ((3, 0, 1, 7, 2) * 5, 2),
    "long and short": ((5, 400, 60, 140), 0),
}
# fp32 sums of exact products in another order, and one rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SMALLEST = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in TOLERANCE}


def ends_of(routing: str) -> tuple[torch.Tensor, int]:
    """(group_ends, tokens) of a routing."""
    sizes, rest = ROUTINGS[routing]
    return torch.tensor(sizes).cumsum(0).int(), sum(sizes) + rest


def random_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Blocks of very different size: a scale in the wrong place is seen."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 2, rows)[:, None] * torch.logspace(-1, 1, columns)[None, :]


def operands_along_m(group_ends, tokens: int, n: int, k: int):
    """(a, b) of `output` and `grad_input`; a holds NaN in the rows of no group."""
    a = ops.quantize(random_matrix(tokens, k, 0), FP8_1X128, backend="reference").rowwise
    used = int(group_ends[-1])
    a.qdata.view(torch.uint8)[used:], a.scale[:, used:] = 0x7F, float("nan")
    weights = [random_matrix(n, k, 1 + g) * 2.0**g for g in range(group_ends.numel())]
    quantized = [ops.quantize(w, FP8_128X128, backend="reference").rowwise for w in weights]
    b = quantized[0]._replace(
        qdata=torch.stack([w.qdata.view(torch.uint8) for w in quantized]).view(torch.float8_e4m3fn),
        scale=torch.stack([w.scale for w in quantized]),
    )
    return a, b


def operands_along_k(group_ends, tokens: int, n: int, k: int):
    """(a, b) of `grad_weight`."""
    options = {"rowwise": False, "columnwise": True, "backend": "reference"}
    return [
        ops.quantize(random_matrix(tokens, size, seed), FP8_1X128, groups=group_ends, **options).columnwise
        for seed, size in enumerate((n, k))
    ]


FORMATS = {"m": (FP8_1X128, FP8_128X128), "k": (FP8_1X128, FP8_1X128)}
OPERANDS = {"m": operands_along_m, "k": operands_along_k}


def reference(a, b, group_ends, along):
    return ops.grouped_matmul(a, b, group_ends, along=along, out_dtype=torch.float32, backend="reference")


class Expected(NamedTuple):
    """A product, and of each element the sum of the magnitudes that it is the sum of."""

    product: torch.Tensor
    magnitudes: torch.Tensor

    @classmethod
    def of(cls, a, b, group_ends, along: str, start=0.0) -> Expected:
        def magnitude(x):
            return x._replace(qdata=x.qdata.float().abs().to(x.qdata.dtype))

        product = reference(a, b, group_ends, along) + start
        magnitudes = reference(magnitude(a), magnitude(b), group_ends, along) + abs(torch.as_tensor(start))
        return cls(product, magnitudes.clamp_min(1e-30))

    def error(self, out) -> float:
        """Largest error of an element, relative to its magnitudes; Inf for a NaN."""
        error = ((out.float() - self.product).abs() - SMALLEST[out.dtype] / 2).clamp_min(0) / self.magnitudes
        return error.nan_to_num(nan=float("inf")).max().item()


def relative_error(out, a, b, group_ends, along: str, start=0.0) -> float:
    return Expected.of(a, b, group_ends, along, start).error(out)
