"""Operations of a layer in compiled graphs."""

from __future__ import annotations

import collections

import pytest
import torch
from helpers import FP8, NVFP4, weight
from shared_inputs import counting_backend
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import ops
from torchao_blockwise.conversion import experts
from torchao_blockwise.formats import CastOptions, Groups
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.tensors.weight_operands import weight_options
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")
OPS = torch.ops.torchao_blockwise
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


ENDS = torch.tensor([5, 5, 38], dtype=torch.int32)


def check(op, args, expected) -> None:
    """Shapes are known without running it, for any number of tokens; the schema's test cannot compare e4m3."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.default, args, test_utils=tests)
    assert_bitwise_equal(op(*args), expected)


@FORMATS
@pytest.mark.parametrize("ends", (None, ENDS), ids=("dense", "experts"))
@pytest.mark.parametrize("columnwise", (False, True), ids=("output", "grad_input"))
@pytest.mark.parametrize("rounded_to", (None, torch.bfloat16), ids=("as_is", "rounded"))
def test_gemms_with_a_weight(config, ends, columnwise, rounded_to):
    """Of its values, rounded first where they are cast, and of its payload: what a transpose and a GEMM give."""
    hp = weight(40, 70) if ends is None else weight(3, 40, 70)
    a = ops.quantize(torch.randn(40, 40 if columnwise else 70), config.activation_format).rowwise
    b = ops.quantize(hp if rounded_to is None else hp.to(rounded_to), config.weight_format).rowwise
    w = ops.transpose(b, columns=70) if columnwise else b
    if ends is None:
        expected = ops.matmul(a, w, out_dtype=torch.float32)
    else:
        expected = ops.grouped_matmul(a, w, ends, out_dtype=torch.float32)
    rest = torch.float32, None, ends, None, "auto"
    options = weight_options(config, columnwise)
    check(OPS.master_matmul, (*a, hp, options.fmt.name, *options[1:], "", rounded_to, *rest), expected)
    if rounded_to is None:
        check(OPS.quantized_matmul, (*a, *b, 70, columnwise, *rest), expected)


@FORMATS
@pytest.mark.parametrize("ends", (None, ENDS), ids=("dense", "experts"))
def test_grad_weight(config, ends):
    """The product of copies along the tokens; how many of these are padding changes nothing but what is counted."""
    options = CastOptions(config.activation_format, rowwise=False, columnwise=True, padded=True)
    groups = None if ends is None else Groups(ends)
    dy, x = (ops.quantize_by(torch.randn(40, width), options, groups).columnwise for width in (48, 64))
    if ends is None:
        expected = ops.matmul(dy, x, out_dtype=torch.float32)
    else:
        expected = ops.grouped_matmul(dy, x, ends, along="k", out_dtype=torch.float32)
    check(OPS.grad_weight, (*dy, *x, ends, None, 40, torch.float32, "auto"), expected)
