"""The self-test: it has a case for every operation, passes what is right, and finds what is wrong."""

from __future__ import annotations

import sys

import pytest
import torch

from torchao_blockwise.diagnostics import self_test
from torchao_blockwise.diagnostics.cases import cases
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.backend import Implementation
from torchao_blockwise.ops.gemm.plain import matmul_op
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.transposition import transpose_op

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")
CALL, RANDOM_STATE = Operation.__call__, torch.get_rng_state()
CASES = cases(CPU)
UNCHANGED = Operation.__call__ is CALL, torch.equal(torch.get_rng_state(), RANDOM_STATE)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Cases are recorded once."""
    monkeypatch.setattr(self_test, "cases", lambda device: CASES)


def test_recording_leaves_nothing():
    assert UNCHANGED == (True, True)


def test_every_operation_has_a_case():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torchao_blockwise.ops")]
    operations = [x for module in modules for x in vars(module).values() if isinstance(x, Operation)]
    # One that has a single implementation has nothing to be compared with.
    assert {case.op.name for case in CASES} == {op.name for op in operations if op.table[0].backend is not Backend.AUTO}


def test_the_reference_computes_all_of_them_on_a_cpu():
    for report in self_test.check_operations(CPU):
        assert report.auto == "reference" and report.checks == {"reference": ""}
        assert all(report.passed.values())
    assert not any(report.checks for report in self_test.check_operations(CPU, run=False))


def _raise(*args):
    raise RuntimeError("out of\nluck")


BROKEN = {
    "bits": (
        transpose_op,
        lambda right: right._replace(scale=(right.scale.float() * 2).to(right.scale.dtype)),
        "bits differ from the reference",
    ),
    "shape": (transpose_op, lambda right: right._replace(scale=right.scale[:1]), "bits differ from the reference"),
    "sums": (matmul_op, lambda right: right * 1.25, "differs from the reference by 0.25"),
    "not a number": (matmul_op, lambda right: right * float("nan"), "differs from the reference by inf"),
    "error": (matmul_op, _raise, "RuntimeError: out of"),
    "within rounding": (matmul_op, lambda right: right * (1 + 2.0**-8), ""),
}


@pytest.fixture
def spoil(monkeypatch):
    """(operation, function) -> nothing; AUTO takes a backend that gives this function of the reference's results."""

    def spoiled(op, function):
        right = next(row for row in op.table if row.backend is Backend.REFERENCE)
        row = Implementation(Backend.CUBLAS, lambda *args: function(right.function(*args)))
        monkeypatch.setattr(op, "table", [row, *op.table])

    return spoiled


@pytest.mark.parametrize(("op", "function", "said"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_result_is_found(op, function, said, spoil, monkeypatch):
    monkeypatch.setattr(self_test, "cases", lambda device: [case for case in CASES if case.op is op])
    spoil(op, function)
    found = list(self_test.check_operations(CPU))
    assert found and all(report.checks["cublas"] == said for report in found)
    assert all(report.auto == "cublas" for report in found)


def test_layers_are_as_near_to_fp32_as_their_operands(spoil):
    found = list(self_test.check_layers(CPU))
    assert [x.recipe for x in found] == ["fp8"] * 3 + ["nvfp4"] * 3 and all(x.is_right for x in found)
    spoil(matmul_op, lambda right: right * 1.25)
    assert not any(x.is_right for x in self_test.check_layers(CPU))
