"""ops.quantize on meta tensors, and what it refuses with which message."""

from __future__ import annotations

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16

X = torch.ones(2, 32)
TYPE_REFUSALS = {
    dtype: f"quantize: x must be bfloat16, float16 or float32, got {dtype}; cast it first"
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn)
}
NO_KERNEL_DEVICE = "Triton kernels run on CUDA devices, got cpu (TRITON_INTERPRET=1 interprets them on a CPU)"
REFUSALS = {
    "1-D": (
        lambda: ops.quantize(torch.ones(32), FP8_1X128),
        "quantize: x must have at least 2 dims [.., M, K], got shape [32]; reshape it",
    ),
    "unknown format": (
        lambda: ops.quantize(X, "fp8"),
        "no block format 'fp8'; the formats are fp8_1x128, fp8_128x128, nvfp4_1x16, nvfp4_16x16",
    ),
    "nothing asked": (
        lambda: ops.quantize(X, FP8_1X128, rowwise=False),
        "quantize: nothing to compute; ask for rowwise, columnwise or both",
    ),
    "power_of_2 on nvfp4": (
        lambda: ops.quantize(X, NVFP4_1X16, power_of_2_scales=True),
        "quantize: nvfp4_1x16 has no power_of_2_scales; its block scales are torch.float8_e4m3fn",
    ),
    "tensor_amax on fp8": (
        lambda: ops.quantize(X, FP8_1X128, tensor_amax=torch.tensor(1.0)),
        "quantize: fp8_1x128 has no tensor scale; leave tensor_amax out",
    ),
    "tensor_amax of one element": (
        lambda: ops.quantize(X, NVFP4_1X16, tensor_amax=torch.ones(1)),
        "quantize: tensor_amax must be a float32 scalar, got torch.float32 of shape [1]",
    ),
    "tensor_amax in bf16": (
        lambda: ops.quantize(X, NVFP4_1X16, tensor_amax=torch.tensor(1.0, dtype=torch.bfloat16)),
        "quantize: tensor_amax must be a float32 scalar, got torch.bfloat16 of shape []",
    ),
    "unknown backend": (
        lambda: ops.quantize(X, FP8_1X128, backend="cuda"),
        "no backend 'cuda'; the backends are auto, reference, triton, cublas, gluon, deep_gemm, cutlass;"
        " did you mean 'cublas'?",
    ),
    "backend without an implementation": (
        lambda: ops.quantize(X, FP8_1X128, backend="cublas"),
        "quantize: backend cublas has no implementation; choose one of gluon, triton, reference, or auto",
    ),
}


@pytest.mark.parametrize("dtype", TYPE_REFUSALS, ids=lambda d: str(d)[6:])
def test_refuses_dtype(dtype):
    with pytest.raises(TypeError) as error:
        ops.quantize(torch.ones(2, 32).to(dtype), FP8_1X128)
    assert str(error.value) == TYPE_REFUSALS[dtype]


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_a_named_backend_that_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError) as error:
        ops.quantize(X, FP8_1X128, backend="triton")
    assert str(error.value) == f"quantize: backend triton cannot run: {NO_KERNEL_DEVICE}; choose another, or auto"


@pytest.mark.parametrize("columnwise", (False, True))
def test_messages_name_the_function(columnwise):
    with pytest.raises(ValueError, match=r"^quantize: backend cublas has no implementation"):
        ops.quantize(torch.ones(4, 128), FP8_1X128, columnwise=columnwise, backend="cublas")
