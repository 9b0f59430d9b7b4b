"""The largest magnitude of a tensor and its tensor scale: kernels have the bits of the reference."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, global_scale_of
from torchao_blockwise.ops.backend import Backend, why_no_triton
from torchao_blockwise.ops.quantization import global_scale_op, reference, tensor_amax_bits_op
from torchao_blockwise.testing import random_tensor

kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_amax")
reason = why_no_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "-0": -0.0, "subnormal": 1e-7}


def bits(x: torch.Tensor) -> int:
    """Of an fp32 scalar; every NaN alike."""
    return x.view(torch.float32).nan_to_num(nan=-1.0, posinf=float("inf")).view(torch.int32).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 128), (129, 1000), (2, 33, 40), (0, 16), (70001, 3)], ids=str)
def test_amax(shape, dtype, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    assert bits(tensor_amax_bits_op(x, None, False, Backend.AUTO)) == bits(reference.tensor_amax_bits(x, None, False))
    if x.numel():
        # Wherever it lies, and whatever its sign.
        for place in (0, x.numel() // 2, x.numel() - 1):
            y = torch.zeros_like(x)
            y.view(-1)[place] = -1.5
            assert bits(tensor_amax_bits_op(y, None, False, Backend.AUTO)) == bits(torch.tensor(1.5))


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype, name, device):
    x = torch.zeros(40, 50, dtype=dtype, device=device)
    x[17, 3] = SPECIAL[name]
    assert bits(tensor_amax_bits_op(x, None, False, Backend.AUTO)) == bits(reference.tensor_amax_bits(x, None, False))


def test_strides(device):
    x = random_tensor(48, 70, dtype=torch.bfloat16, device=device)
    for view in (x.t(), x[:, 3:20], x[::2], x[:1].expand(5, 70)):
        assert bits(tensor_amax_bits_op(view, None, False, Backend.AUTO)) == bits(
            reference.tensor_amax_bits(view, None, False)
        )


@pytest.mark.parametrize(
    "ends", [(0, 0, 0), (10, 20, 48), (3, 3, 40), (20, 10, 5), (-4, 30, 99), (-3, -2, -1)], ids=str
)
def test_amax_of_rows_in_groups(ends, device, monkeypatch):
    """Ends as a GPU takes them, wrong ones too; what rows behind them hold does not count."""
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    x = random_tensor(48, 70, dtype=torch.bfloat16, device=device)
    x[40:] = float("nan")
    assert bits(kernels.tensor_amax_bits(x, ends, False)) == bits(reference.tensor_amax_bits(x, ends, False))


def test_the_operation_of_groups_takes_the_kernel(device, machine):
    launches = machine.launches_of(kernels)
    x, ends = random_tensor(8, 16, device=device), torch.tensor([2, 5], dtype=torch.int32, device=device)
    assert bits(tensor_amax_bits_op(x, ends, False, Backend.AUTO)) == bits(x[:5].abs().amax())
    assert len(launches) == 1


@pytest.mark.parametrize("amax", [0.0, 1.0, 3.0, 2688.0, 1e-40, 1e-45, 3.4e38, float("inf"), float("nan")])
def test_global_scale(amax, device):
    amax = torch.tensor(amax, device=device)
    assert bits(global_scale_op(amax.view(torch.int32), Backend.AUTO)) == bits(global_scale_of(amax))


def test_quantize_asks_once_and_launches_little(device, machine):
    """An NVFP4 copy is an amax, its tensor scale, and one quantizer: three launches."""
    launches = machine.launches_of(kernels)
    ops.quantize(random_tensor(32, 64, dtype=torch.bfloat16, device=device), NVFP4_1X16, columnwise=True)
    assert [launch.kernel for launch in launches] == [kernels._amax_kernel, kernels._global_scale_kernel]


def test_the_reference_by_name_launches_nothing(device, machine):
    launches = machine.launches_of(kernels)
    x, ends = random_tensor(32, 64, dtype=torch.bfloat16, device=device), torch.tensor([5, 32], dtype=torch.int32)
    ops.quantize(x, NVFP4_1X16, columnwise=True, backend="reference")
    ops.quantize(x, NVFP4_1X16, groups=ends.to(device), columnwise=True, backend="reference")
    assert launches == []
