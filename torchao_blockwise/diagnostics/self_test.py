"""The self-test, which compares each backend with the reference, and a linear layer of each recipe with fp32.

Every case runs on all backends that can run it; the linear layers run forward and backward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import _compat, ops
from torchao_blockwise.diagnostics.cases import FEATURES_IN, FEATURES_OUT, TOKENS, Case, cases
from torchao_blockwise.diagnostics.layers import RECIPES
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.backend import Backend, Implementation, ranked

# The tolerance for operations in which backends sum in different orders: two units in the last place of bfloat16. FP8
# tensor cores keep 14 bits of a sum, which is finer.
TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class OperationReport:
    """The backends of a case.

    auto: the backend that AUTO chooses. passed: {backend: why it cannot run the case}.
    checks: {backend: the error of its result, or ""} for the backends that were run.
    """

    name: str
    of: str
    auto: str
    passed: dict[str, str]
    checks: dict[str, str]


@dataclass(frozen=True)
class ProductReport:
    """A GEMM of a layer. error: the relative error, compared with fp32. limit: the largest error of a right result."""

    recipe: str
    product: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit


def check_operations(device: torch.device, run: bool = True) -> Iterator[OperationReport]:
    """Yield the backends of every case on `device`; with `run`, compare all that can run it with the reference.

    Builds kernels that are not in the cache, which takes a second or two each.
    """
    for case in cases(device):
        prefers = case.op.preferred_backend
        rows = ranked(case.op.table, None if prefers is None else prefers(*case.args))
        reasons = [row.reason(case.args) for row in rows]
        able = [row for row, reason in zip(rows, reasons) if reason is None]
        done = {row.backend for row in able}
        # A backend may have several implementations; the reason of the last one is reported.
        passed = {row.backend.value: reason for row, reason in zip(rows, reasons) if reason and row.backend not in done}
        checks = _checks(case, able) if run else {}
        yield OperationReport(case.op.name, case.of, able[0].backend.value, passed, checks)


def _checks(case: Case, able: list[Implementation]) -> dict[str, str]:
    reference = next(row for row in able if row.backend is Backend.REFERENCE)
    expected = _results(reference, case)
    is_finite = all(bool(x.float().isfinite().all()) for x in expected if x.is_floating_point())
    checks = {reference.backend.value: "" if is_finite else "not all of its results are finite"}
    for row in able:
        if row is not reference:
            name = row.backend.value
            checks[name] = checks.get(name) or _why_wrong(row, case, expected)
    return checks


def _why_wrong(row: Implementation, case: Case, expected: list[torch.Tensor]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _results(row, case)
    except Exception as error:
        # A compiler or a driver may raise anything; report it.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    off = max(_error(x, y, case.exact) for x, y in zip(found, expected, strict=True))
    if off <= (0 if case.exact else TOLERANCE):
        return ""
    return "bits differ from the reference" if case.exact else f"differs from the reference by {off:.2g}"


def _results(row: Implementation, case: Case) -> list[torch.Tensor]:
    """Return the results of an implementation on the CPU; for an operation that writes in place, its arguments."""
    own = _compat.pytree.tree_map_only(torch.Tensor, torch.clone, list(case.args))
    with torch.no_grad():
        out = row.function(*own)
    writes = _compat.schema_of(case.op.overload).is_mutable
    leaves = _compat.pytree.tree_leaves(own if writes else out)
    return [case.defined(x.cpu()) for x in leaves if isinstance(x, torch.Tensor)]


def _error(x: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    if (x.shape, x.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if exact or not x.is_floating_point():
        same = torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (x, expected)))
        return 0.0 if same else math.inf
    error = _distance(x.double(), expected.double())
    return math.inf if math.isnan(error) else error


def _distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x - expected).norm() / (expected.norm() or 1.0)).item()


def check_layers(device: torch.device) -> Iterator[ProductReport]:
    """Run forward and backward of a linear layer with each recipe, and compare the results with fp32.

    The product of two random matrices with relative errors e1 and e2 has the error √(e1² + e2²); the limit is e1 + e2.
    """
    numbers = torch.Generator().manual_seed(0)
    w, x, dy = (
        torch.randn(*shape, generator=numbers, dtype=torch.float32, device="cpu").to(device)
        for shape in ((FEATURES_OUT, FEATURES_IN), (TOKENS, FEATURES_IN), (TOKENS, FEATURES_OUT))
    )
    plain = {"output": x @ w.mT, "grad_input": dy @ w, "grad_weight": dy.mT @ x}
    for recipe in ("fp8", "nvfp4"):
        config = RECIPES[recipe]
        of_x, of_dy = (_rounding(t, config.activation_format) for t in (x, dy))
        of_w = _rounding(w, config.weight_format)
        layer = nn.Linear(FEATURES_IN, FEATURES_OUT, bias=False, device="meta")
        layer.weight = nn.Parameter(w.clone())
        quantize_(layer, config)
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            output = layer(given)
            found = output.detach(), *torch.autograd.grad(output, (given, layer.weight), dy)
        for (name, expected), got, limit in zip(plain.items(), found, (of_x + of_w, of_dy + of_w, of_dy + of_x)):
            yield ProductReport(recipe, name, _distance(got, expected), limit)


def _rounding(x: torch.Tensor, fmt: BlockFormat) -> float:
    return _distance(ops.dequantize(ops.quantize(x, fmt).rowwise, columns=x.shape[1], dtype=torch.float32), x)
