"""Amaxes of tensors, groups and matrices, and their tensor scales: kernels are bitwise identical to the reference."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, global_scale_of
from torchao_blockwise.ops.backend import Backend, why_no_triton
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.ops.quantization.operations import global_scale_op
from torchao_blockwise.testing import random_tensor

kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_amax")
reason = why_no_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

dtypes = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)


def bits(x: torch.Tensor) -> list[int]:
    """Of fp32; every NaN alike."""
    return x.view(torch.float32).nan_to_num(nan=-1.0, posinf=float("inf")).view(torch.int32).tolist()


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (129, 1000), (2, 33, 40), (2, 2, 9, 1030), (4, 0, 8), (3001, 7)])
def test_shapes(shape, dtype, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    for each in (False, True):
        assert bits(kernels.tensor_amax_bits(x, None, each)) == bits(reference.tensor_amax_bits(x, None, each)), each


@pytest.mark.parametrize("amax", [0.0, 1.0, 3.0, 2688.0, 1e-40, 1e-45, 3.4e38, float("inf"), float("nan")])
def test_global_scale(amax, device):
    amax = torch.tensor([amax, 1.0], device=device)
    assert bits(global_scale_op(amax.view(torch.int32), Backend.AUTO)) == bits(global_scale_of(amax))
    assert bits(global_scale_op(amax.view(torch.int32)[0], Backend.AUTO)) == bits(global_scale_of(amax)[0])


def test_who_launches(device, machine):
    """Two launches make an amax and its tensor scale; by the reference's name nothing is launched."""
    launches = machine.launches_of(kernels)
    x, ends = random_tensor(32, 64, device=device), torch.tensor([5, 32], dtype=torch.int32, device=device)
    for groups in (None, ends):
        ops.quantize(x, NVFP4_1X16, columnwise=True, groups=groups, backend="reference")
    assert launches == []
    ops.quantize(x, NVFP4_1X16, columnwise=True)
    assert [launch.kernel for launch in launches] == [kernels._amax_kernel, kernels._global_scale_kernel]
