"""Operations: who computes it on a device, why others do not, and whether their results agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchao_blockwise import _compat
from torchao_blockwise.diagnostics.cases import Case, cases
from torchao_blockwise.ops.backend import Backend, Implementation

# What backends may differ by, where the order of sums is their own: two units in the last place of a bfloat16. FP8
# tensor cores keep 14 bits of a sum, which is finer.
TOLERANCE = 2.0**-7


class OperationReport(NamedTuple):
    """Who computes a case.

    auto: the backend that AUTO takes. passed: (backend, why it cannot) of the others that cannot.
    checks: (backend, what is wrong with its result or "") of those that were run.
    """

    name: str
    of: str
    auto: Backend
    passed: tuple[tuple[Backend, str], ...]
    checks: tuple[tuple[Backend, str], ...]


def check_operations(device: torch.device, run: bool = True) -> Iterator[OperationReport]:
    """Who computes every case on `device`; with `run` all backends that can do so, and are compared with the reference.

    Builds kernels where they are not built yet, which takes a second or two each.
    """
    for case in cases(device):
        yield _report(case, run)


def _report(case: Case, run: bool) -> OperationReport:
    rows = case.op.ranked(*case.args)
    reasons = [row.reason(case.args) for row in rows]
    able = [row for row, reason in zip(rows, reasons) if reason is None]
    done = {row.backend for row in able}
    # A backend may have several rows, of which the last one says why the backend cannot.
    passed = {row.backend: reason for row, reason in zip(rows, reasons) if reason and row.backend not in done}
    checks = _checks(case, able) if run else {}
    name = case.op.name
    return OperationReport(name, case.of, able[0].backend, tuple(passed.items()), tuple(checks.items()))


def _checks(case: Case, able: list[Implementation]) -> dict[Backend, str]:
    reference = next(row for row in able if row.backend is Backend.REFERENCE)
    expected = _results(reference, case)
    checks = {reference.backend: "" if all(map(_is_finite, expected)) else "not all of its results are finite"}
    for row in able:
        if row is not reference:
            checks[row.backend] = checks.get(row.backend) or _why_wrong(row, case, expected)
    return checks


def _why_wrong(row: Implementation, case: Case, expected: list[torch.Tensor]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _results(row, case)
    except Exception as error:
        # Whatever a compiler or a driver raises is what is to be reported.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    errors = [_error(x, y, case.exact) for x, y in zip(found, expected, strict=True)]
    if not any(errors):
        return ""
    return "bits differ from the reference" if case.exact else f"off the reference by {max(errors):.2g}"


def _results(row: Implementation, case: Case) -> list[torch.Tensor]:
    """What a row gives, as tensors on the CPU; of what writes in place its arguments."""
    own = _compat.pytree.tree_map_only(torch.Tensor, torch.clone, list(case.args))
    with torch.no_grad():
        out = row.function(*own)
    writes = _compat.schema_of(case.op.overload).is_mutable
    leaves = _compat.pytree.tree_leaves(own if writes else out)
    return [case.defined(x.cpu()) for x in leaves if isinstance(x, torch.Tensor)]


def _error(x: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    """0 where a result is right."""
    if (x.shape, x.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if exact or not x.is_floating_point():
        return 0.0 if torch.equal(_bytes(x), _bytes(expected)) else math.inf
    norm_of = expected.double().norm().item()
    error = (x.double() - expected.double()).norm().item() / (norm_of or 1.0)
    # NaN is no small error.
    return 0.0 if error <= TOLERANCE else error if error == error else math.inf


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _is_finite(x: torch.Tensor) -> bool:
    return bool(x.float().isfinite().all()) if x.is_floating_point() else True
