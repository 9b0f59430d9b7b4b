"""The self-test of kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise.diagnostics import operations
from torchao_blockwise.diagnostics.cases import cases
from torchao_blockwise.ops import Backend

# A kernel or two of each folder: all of them take the interpreter a minute.
INTERPRETED = ("group_tables", "matmul", "norm_quantize", "partial_cast", "swiglu", "transpose")


@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_agree_with_the_reference(name, monkeypatch):
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [case for case in cases(device) if case.op.name == name and "nvfp4" not in case.of]
    monkeypatch.setattr(operations, "cases", lambda device: chosen)
    for report in operations.check_operations(device):
        assert dict(report.checks)[Backend.TRITON] == "" and not any(wrong for _, wrong in report.checks)
