"""The self-test of operations: it knows all of them, passes what is right, and finds what is wrong."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.diagnostics import operations
from torchao_blockwise.diagnostics.cases import cases
from torchao_blockwise.diagnostics.layer_checks import check_layers
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.backend import Implementation
from torchao_blockwise.ops.gemm.plain import matmul_op
from torchao_blockwise.ops.transposition import transpose_op

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


def test_every_operation_has_a_case():
    folders = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")
        if found.ispkg or found.name.endswith((".plain", ".grouped"))
    ]
    found = [x for folder in folders for x in vars(folder).values() if hasattr(x, "overload")]
    # One that has a single implementation has nothing to be compared with.
    defined = {op.name for op in found if op.table[0].backend is not Backend.AUTO}
    assert {case.op.name for case in cases(CPU)} == defined


def test_the_reference_computes_all_of_them_on_a_cpu():
    for report in operations.check_operations(CPU):
        assert report.auto is Backend.REFERENCE and report.checks == ((Backend.REFERENCE, ""),)
        # Why others cannot is said of all that there are.
        assert all(reason for _, reason in report.passed)


def test_nothing_runs_where_that_is_not_asked_for():
    assert {report.checks for report in operations.check_operations(CPU, run=False)} == {()}


def _raise(*args):
    raise RuntimeError("out of\nluck")


def _doubled(right):
    return right._replace(scale=(right.scale.float() * 2).to(right.scale.dtype))


BROKEN = {
    "bits": (
        transpose_op,
        _doubled,
        "bits differ from the reference",
    ),
    "shape": (transpose_op, lambda right: right._replace(scale=right.scale[:1]), "bits differ from the reference"),
    "sums": (matmul_op, lambda right: right * 1.25, "off the reference by 0.25"),
    "not a number": (matmul_op, lambda right: right * float("nan"), "off the reference by inf"),
    "error": (matmul_op, _raise, "RuntimeError: out of"),
    "within rounding": (matmul_op, lambda right: right * (1 + 2.0**-8), ""),
}


@pytest.mark.parametrize(("op", "spoil", "said"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_result_is_found(op, spoil, said, monkeypatch):
    right = next(row for row in op.table if row.backend is Backend.REFERENCE)
    spoiled = Implementation(Backend.CUBLAS, lambda *args: spoil(right.function(*args)))
    monkeypatch.setattr(operations, "cases", lambda device: [case for case in cases(device) if case.op is op])
    op.table.insert(0, spoiled)
    try:
        found = list(operations.check_operations(CPU))
    finally:
        op.table.remove(spoiled)
    assert found and all(dict(report.checks)[Backend.CUBLAS] == said for report in found)
    assert all(report.auto is Backend.CUBLAS for report in found)


def test_layers_are_as_near_to_fp32_as_their_operands(monkeypatch):
    found = list(check_layers(CPU))
    assert [x.recipe for x in found] == ["fp8"] * 3 + ["nvfp4"] * 3 and all(x.is_right for x in found)
    right = next(row for row in matmul_op.table if row.backend is Backend.REFERENCE)
    off = Implementation(Backend.CUBLAS, lambda *args: right.function(*args) * 1.25)
    matmul_op.table.insert(0, off)
    try:
        assert not any(x.is_right for x in check_layers(CPU))
    finally:
        matmul_op.table.remove(off)
