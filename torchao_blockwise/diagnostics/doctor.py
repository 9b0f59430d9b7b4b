"""The doctor: versions, the backend of each operation, why other backends cannot run, and a self-test."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchao_blockwise.conversion.report import aligned
from torchao_blockwise.diagnostics.environment import PROBLEM, Finding, facts, findings
from torchao_blockwise.diagnostics.self_test import OperationReport, ProductReport, check_layers, check_operations


@dataclass(frozen=True)
class Examination:
    """The result of `examine`; print it for tables.

    facts: versions and the device. operations: the backends of each operation and their test results. products: the
    errors of a layer's GEMMs for each recipe. findings: problems and notes about the environment. tested: whether
    operations were run.
    """

    device: str
    facts: dict[str, str]
    operations: list[OperationReport]
    products: list[ProductReport]
    findings: list[Finding]
    tested: bool

    @property
    def is_healthy(self) -> bool:
        """Whether there are no problems and all results are right."""
        return not (self._failures() or self._problems())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, ready for JSON, and "healthy": bool."""
        return {**asdict(self), "healthy": self.is_healthy}

    def __str__(self) -> str:
        parts = [aligned(("what", "version"), list(self.facts.items()), None, words=2), self._operation_table()]
        if self.tested:
            rows = [
                (p.recipe, p.product, f"{p.error:.2%}", f"{p.limit:.2%}", "ok" if p.is_right else "failed")
                for p in self.products
            ]
            title = "a linear layer of each recipe: the relative errors of its GEMMs, compared with fp32\n"
            parts.append(title + aligned(("recipe", "GEMM", "error", "limit", "self-test"), rows, None, words=2))
        if self.findings:
            parts.append("\n".join(f"{finding.kind}: {finding.text}" for finding in self.findings))
        return "\n\n".join((self._summary(), *parts))

    def _operation_table(self) -> str:
        """Return the table of operations, with numbered reasons below it."""
        numbers: dict[str, int] = {}
        rows = []
        for x in self.operations:
            why = [f"{name} [{numbers.setdefault(reason, len(numbers) + 1)}]" for name, reason in x.passed.items()]
            # The reference ran, but is not compared with anything.
            right = {name: "ran" if name == "reference" else "ok" for name in x.checks}
            tested = [f"{name} {'failed' if wrong else right[name]}" for name, wrong in x.checks.items()]
            rows.append((x.name, x.of, x.auto, ", ".join(tested) or "-", ", ".join(why) or "-"))
        header = ("operation", "of", "auto takes", "self-test", "cannot, and why")
        reasons = "".join(f"\n[{number}] {reason}" for reason, number in numbers.items())
        wrong = "".join(f"\nfailed: {x.name} of {x.of} by {by}: {why}" for x, by, why in self._failures() if by)
        return aligned(header, rows, None, words=len(header)) + reasons + wrong

    def _failures(self) -> list[tuple[Any, str, str]]:
        """Return (report, backend, error) of operations that failed, (report, "", "") of GEMMs that failed."""
        of_operations = [(x, by, wrong) for x in self.operations for by, wrong in x.checks.items() if wrong]
        return [*of_operations, *((product, "", "") for product in self.products if not product.is_right)]

    def _problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == PROBLEM]

    def _summary(self) -> str:
        checks = sum(len(x.checks) for x in self.operations) + len(self.products)
        tested = f"{checks - len(self._failures())} of {checks} checks passed" if self.tested else "nothing was run"
        problems = len(self._problems())
        healthy = "healthy" if self.is_healthy else "not healthy"
        return f"{healthy}: {tested}, {problems} problem{'s' * (problems != 1)}"


def examine(device: torch.device | str | None = None, *, run: bool = True) -> Examination:
    """Check the environment, list the backends of every operation on `device`, and test all that can run.

    device: default the GPU, or the CPU if there is none. run: whether to run operations; the first run on a GPU builds
    kernels, which takes a minute or two. RNG states do not change.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    found = findings(device)
    operations: list[OperationReport] = []
    products: list[ProductReport] = []
    try:
        operations += check_operations(device, run)
        products += check_layers(device) if run else ()
    except Exception as error:
        # A broken installation may raise anything; report it.
        found.insert(0, Finding(PROBLEM, f"the self-test ended with {type(error).__name__}: {error}"))
    return Examination(str(device), facts(device), operations, products, found, run)
