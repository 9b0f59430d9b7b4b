"""Operations of a layer in compiled graphs."""

from __future__ import annotations

import collections

import pytest
import torch
from helpers import FP8, NVFP4
from shared_inputs import counting_backend
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import ops
from torchao_blockwise.conversion import experts
from torchao_blockwise.formats import CastOptions, Groups
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")
OPS = torch.ops.torchao_blockwise
# A CPU cannot compare e4m3, which the check of schemas does.
CHECKS = ("test_faketensor",)
FORMATS = pytest.mark.parametrize("config", (FP8, NVFP4), ids=lambda config: config.activation_format.name)


def operations(model: nn.Module, x: torch.Tensor, *rest: torch.Tensor) -> list[collections.Counter]:
    """How often each of our operations stands in the forward graph, and in the backward graph."""
    backend, counts = counting_backend()
    torch.compile(model, backend=backend, fullgraph=True)(x.requires_grad_(), *rest).sum().backward()
    return counts


@FORMATS
def test_a_linear_layer(config):
    linear = nn.Linear(64, 48, bias=True).bfloat16()
    quantize_(linear, config)
    forward, backward = operations(linear, torch.randn(33, 64, dtype=torch.bfloat16))
    copies = {"quantize_both": 1} | ({"tensor_amax_bits": 1, "global_scale": 1} if config is NVFP4 else {})
    assert forward == {**copies, "master_matmul": 1}
    assert backward == {**copies, "master_matmul": 1, "grad_weight": 1}


def test_experts():
    layer = nn.Sequential(collections.OrderedDict(experts=SwiGLUExperts(2, 64, 128).bfloat16()))
    quantize_(layer, FP8, filter_fn=experts())
    ends = torch.tensor([10, 33], dtype=torch.int32)
    forward, backward = operations(layer.experts, torch.randn(33, 64, dtype=torch.bfloat16), ends)
    assert forward == {"quantize_both": 1, "swiglu_quantize": 1, "master_matmul": 2}
    gemms = {"master_matmul": 2, "grad_weight": 2}
    assert backward == {"quantize_both": 1, "swiglu_backward_quantize": 1, **gemms}


@FORMATS
@pytest.mark.parametrize("groups", (0, 3), ids=("dense", "experts"))
def test_grad_weight(config, groups):
    """The product of copies along the tokens; how many of these are padding changes nothing but what is counted."""
    fmt, ends = config.activation_format, torch.tensor([5, 5, 38], dtype=torch.int32) if groups else None
    tensors = torch.randn(40, 48, dtype=torch.bfloat16), torch.randn(40, 64, dtype=torch.bfloat16)
    options = CastOptions(fmt, rowwise=False, columnwise=True, padded=True)
    dy, x = (ops.quantize_by(t, options, Groups(ends) if groups else None).columnwise for t in tensors)
    args = *dy, *x, ends, None, 40, torch.float32, "auto"
    torch.library.opcheck(OPS.grad_weight.default, args, test_utils=CHECKS)
    if groups:
        expected = ops.grouped_matmul(dy, x, ends, along="k", out_dtype=torch.float32)
    else:
        expected = ops.matmul(dy, x, out_dtype=torch.float32)
    assert_bitwise_equal(OPS.grad_weight(*args), expected)
