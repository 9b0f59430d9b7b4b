"""The doctor's text, verdict and data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from torchao_blockwise.diagnostics import Examination, doctor, examine
from torchao_blockwise.diagnostics.environment import NOTE, PROBLEM, Finding
from torchao_blockwise.diagnostics.self_test import OperationReport, ProductReport

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


@pytest.mark.usefixtures("no_interpreter")
def test_this_machine():
    found = examine("cpu")
    assert len(found.operations) > 50 and not found._failures() and found.tested
    untested = examine("cpu", run=False)
    assert untested.products == [] and "nothing was run" in str(untested)


def test_what_a_broken_installation_raises_is_a_problem(monkeypatch):
    def broken(device, run):
        yield OPERATIONS[0]
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(doctor, "check_operations", broken)
    found = examine("cpu")
    assert not found.is_healthy and found.operations == OPERATIONS[:1]
    assert found.findings[0] == Finding(PROBLEM, "the self-test ended with RuntimeError: CUDA error: no kernel image")
