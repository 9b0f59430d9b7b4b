"""The doctor's text, verdict and data, and its self-test: right results pass, and wrong ones are found."""

import functools
import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline

from torchao_blockwise.diagnostics import Examination, doctor, examine, self_test
from torchao_blockwise.diagnostics.cases import cases
from torchao_blockwise.diagnostics.environment import NOTE, PROBLEM, Finding
from torchao_blockwise.diagnostics.self_test import OperationReport, ProductReport
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.backend import Implementation
from torchao_blockwise.ops.gemm.plain import matmul_op
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.transposition import transpose_op

CPU = torch.device("cpu")
OPERATIONS = [
    OperationReport("matmul", "fp8", "triton", {"gluon": "no Hopper"}, {"reference": "", "triton": ""}),
    OperationReport("permute", "bfloat16", "reference", {"gluon": "no Hopper", "triton": "too old"}, {"reference": ""}),
]
PRODUCT = ProductReport("fp8", "output", 0.037, 0.052)
HEALTHY = Examination("cuda", {"torch": "2.13.0"}, OPERATIONS, [PRODUCT], [Finding(NOTE, "new")], True)
WRONG = replace(
    HEALTHY,
    operations=[replace(OPERATIONS[0], checks={"reference": "", "triton": "bits differ"}), OPERATIONS[1]],
    products=[replace(PRODUCT, error=0.1)],
    findings=[Finding(PROBLEM, "too old")],
)


def test_text():
    assert_expected_inline(
        str(HEALTHY),
        """\
healthy: 4 of 4 checks passed, 0 problems

what   version
-----  -------
torch  2.13.0

operation  of        auto takes  self-test                 cannot, and why
---------  --------  ----------  ------------------------  ---------------------
matmul     fp8       triton      reference ran, triton ok  gluon [1]
permute    bfloat16  reference   reference ran             gluon [1], triton [2]
[1] no Hopper
[2] too old

a linear layer of each recipe: the relative errors of its GEMMs, compared with fp32
recipe  GEMM    error  limit  self-test
------  ------  -----  -----  ---------
fp8     output  3.70%  5.20%         ok

note: new""",
    )


def test_text_of_what_is_wrong():
    assert_expected_inline(
        "\n".join(line for line in str(WRONG).splitlines() if "failed" in line or "problem" in line),
        """\
not healthy: 2 of 4 checks passed, 1 problem
matmul     fp8       triton      reference ran, triton failed  gluon [1]
failed: matmul of fp8 by triton: bits differ
fp8     output  10.00%  5.20%     failed
problem: too old""",
    )


def test_each_part_alone_is_unhealthy_and_data_are_json():
    for part in ("operations", "products", "findings"):
        assert HEALTHY.is_healthy and not replace(HEALTHY, **{part: getattr(WRONG, part)}).is_healthy
    data = WRONG.to_dict()
    assert json.loads(json.dumps(data)) == data and data["healthy"] is False
    assert data["operations"][0]["checks"] == {"reference": "", "triton": "bits differ"}


@functools.cache
def recorded() -> list:
    """The cases on a CPU; recording them leaves no trace."""
    call, random_state = Operation.__call__, torch.get_rng_state()
    found = cases(CPU)
    assert Operation.__call__ is call and torch.equal(torch.get_rng_state(), random_state)
    return found


def test_every_operation_has_a_case():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torchao_blockwise.ops")]
    operations = [x for module in modules for x in vars(module).values() if isinstance(x, Operation)]
    # One that has a single implementation has nothing to be compared with.
    several = {op.name for op in operations if op.table[0].backend is not Backend.AUTO}
    assert {case.op.name for case in recorded()} == several


def test_calls_are_recorded_once_under_a_default_device():
    """There they come through PyTorch's dispatcher."""
    with torch.device("cpu"):
        again = [(case.op.name, case.of) for case in cases(CPU)]
    assert again == [(case.op.name, case.of) for case in recorded()]


def test_this_machine():
    found = examine("cpu")
    assert len(found.operations) > 50 and not found._failures() and found.tested
    for report in found.operations:
        assert report.auto == "reference" and report.checks == {"reference": ""} and all(report.passed.values())
    assert [x.recipe for x in found.products] == ["fp8"] * 3 + ["nvfp4"] * 3
    untested = examine("cpu", run=False)
    assert untested.products == [] and "nothing was run" in str(untested)
    assert not any(report.checks for report in untested.operations)


def test_an_exception_of_a_broken_installation_is_a_problem(monkeypatch):
    def broken(device, run):
        yield OPERATIONS[0]
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(doctor, "check_operations", broken)
    found = examine("cpu")
    assert not found.is_healthy and found.operations == OPERATIONS[:1]
    assert found.findings[0] == Finding(PROBLEM, "the self-test ended with RuntimeError: CUDA error: no kernel image")


def doubled(right):
    return right._replace(scale=(right.scale.float() * 2).to(right.scale.dtype))


BROKEN = {
    "bits": (transpose_op, doubled, "bits differ from the reference"),
    "shape": (transpose_op, lambda right: right._replace(scale=right.scale[:1]), "bits differ from the reference"),
    "sums": (matmul_op, lambda right: right * 1.25, "differs from the reference by 0.25"),
    "not a number": (matmul_op, lambda right: right * float("nan"), "differs from the reference by inf"),
    "error": (matmul_op, mock.Mock(side_effect=RuntimeError("out of\nluck")), "RuntimeError: out of"),
    "within rounding": (matmul_op, lambda right: right * (1 + 2.0**-8), ""),
}


@pytest.mark.parametrize(("op", "function", "said"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_result_is_found(op, function, said, monkeypatch):
    """Of a backend that AUTO takes, which gives this function of the reference's results."""
    right = next(row for row in op.table if row.backend is Backend.REFERENCE)
    row = Implementation(Backend.CUBLAS, lambda *args: function(right.function(*args)))
    monkeypatch.setattr(self_test, "cases", lambda device: [case for case in recorded() if case.op is op])
    monkeypatch.setattr(op, "table", [row, *op.table])
    found = list(self_test.check_operations(CPU))
    assert found and all(report.checks["cublas"] == said for report in found)
    assert all(report.auto == "cublas" for report in found)
    if said.endswith("0.25"):
        assert not any(x.is_right for x in self_test.check_layers(CPU))
