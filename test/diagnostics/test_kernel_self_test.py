"""The self-test of kernels: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from torchao_blockwise.diagnostics import self_test
from torchao_blockwise.diagnostics.cases import cases

# A kernel or two of each folder: all of them take the interpreter a minute.
INTERPRETED = ("group_tables", "matmul", "norm_quantize", "partial_cast", "swiglu", "transpose")


def test_kernels_agree_with_the_reference(monkeypatch):
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [case for case in cases(device) if case.op.name in INTERPRETED and "nvfp4" not in case.of]
    monkeypatch.setattr(self_test, "cases", lambda device: chosen)
    reports = list(self_test.check_operations(device))
    assert {report.name for report in reports} == set(INTERPRETED)
    for report in reports:
        assert report.checks["triton"] == "" and not any(report.checks.values()), report.name
