"""What a layer does in a row is one operation of a compiled graph: which there are, their schemas, and their fakes."""

from __future__ import annotations

import collections

import pytest
import torch
from helpers import FP8, NVFP4
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import ops
from torchao_blockwise.conversion import experts
from torchao_blockwise.formats import CastOptions, Groups, get_format
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")
OPS = torch.ops.torchao_blockwise
# A CPU cannot compare e4m3, which the check of schemas does.
CHECKS = ("test_faketensor",)
FORMATS = pytest.mark.parametrize("config", (FP8, NVFP4), ids=lambda config: config.activation_format.name)


def operations(model: nn.Module, *args: torch.Tensor) -> list[collections.Counter]:
    """How often each of our operations stands in the forward graph, and in the backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    counts = []

    def count(graph, inputs):
        names = [
            str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("torchao_blockwise")
        ]
        counts.append(collections.Counter(names))
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    x, *rest = args
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True)
    compiled(x.requires_grad_(), *rest).sum().backward()
    return counts


@FORMATS
def test_a_linear_layer_is_three_operations(config):
    linear = nn.Linear(64, 48, bias=True).bfloat16()
    quantize_(linear, config)
    forward, backward = operations(linear, torch.randn(33, 64, dtype=torch.bfloat16))
    assert forward == {"quantized_output": 1}
    copies = {"quantize_both": 1} | ({"tensor_amax_bits": 1, "global_scale": 1} if config is NVFP4 else {})
    assert backward == {**copies, "gradients": 1}


def test_experts_are_seven_operations():
    layer = nn.Sequential(collections.OrderedDict(experts=SwiGLUExperts(2, 64, 128).bfloat16()))
    quantize_(layer, FP8, filter_fn=experts())
    ends = torch.tensor([10, 33], dtype=torch.int32)
    forward, backward = operations(layer.experts, torch.randn(33, 64, dtype=torch.bfloat16), ends)
    assert forward == {"quantized_output": 1, "swiglu_quantize": 1, "master_matmul": 1}
    assert backward == {"quantize_both": 1, "gradients": 2, "swiglu_backward_quantize": 1}


def weight_parts(config, quantized: bool, transposed: bool, groups: int) -> tuple[list, list]:
    """(a weight's parts, its recipe's parts), of 64 input and 48 output features."""
    shape = (64, 48) if transposed else (48, 64)
    hp = torch.randn(*((groups,) if groups else ()), *shape, dtype=torch.bfloat16)
    fmt = config.weight_format
    copy = ops.quantize(hp, fmt).rowwise if quantized else None
    parts = [*copy.tensors, fmt.name] if quantized else [hp, None, None, ""]
    return [*parts, shape[1], None], [
        config.activation_format.name,
        fmt.name,
        False,
        0,
        False,
        False,
        transposed,
        "auto",
    ]


CASES = pytest.mark.parametrize(
    ("quantized", "transposed", "groups"),
    [(False, False, 0), (True, False, 0), (False, True, 3), (False, False, 3), (True, False, 3)],
)


@FORMATS
@CASES
@pytest.mark.parametrize("columnwise", (False, True))
def test_quantized_output(config, quantized, transposed, groups, columnwise):
    weight, recipe = weight_parts(config, quantized, transposed, groups)
    x, bias = torch.randn(40, 64, dtype=torch.bfloat16), None if groups else torch.randn(48)
    ends = torch.tensor([5, 5, 38], dtype=torch.int32) if groups else None
    args = x, *weight, bias, ends, None, columnwise, *recipe, torch.float32
    torch.library.opcheck(OPS.quantized_output.default, args, test_utils=CHECKS)
    out, *copy = OPS.quantized_output(*args)
    assert out.shape == (40, 48) and out.dtype == torch.float32
    assert len(copy) == columnwise * (3 if get_format(recipe[0]).has_global_scale else 2)


@FORMATS
@CASES
@pytest.mark.parametrize("needs", ((True, True), (True, False), (False, True)), ids=str)
def test_gradients(config, quantized, transposed, groups, needs):
    weight, recipe = weight_parts(config, quantized, transposed, groups)
    x, dy = torch.randn(40, 64, dtype=torch.bfloat16), torch.randn(40, 48, dtype=torch.bfloat16)
    ends = torch.tensor([5, 5, 38], dtype=torch.int32) if groups else None
    nothing = [None, None, None, ""]

    def copies(tensor):
        if groups:
            return ops.grouped_quantize(tensor, ends, config.activation_format, columnwise=True)
        return ops.quantize(tensor, config.activation_format, columnwise=True, padded=True)

    rowwise, columnwise = copies(dy)
    operands = [*(rowwise if needs[0] else nothing), *(columnwise if needs[1] else nothing)]
    operands += [*(copies(x).columnwise if needs[1] else nothing)]
    args = *weight, *operands, 40, ends, None, *recipe, torch.bfloat16, torch.float32
    torch.library.opcheck(OPS.gradients.default, args, test_utils=CHECKS)
    shapes = [(40, 64)] * needs[0] + [
        (*((groups,) if groups else ()), *((64, 48) if transposed else (48, 64)))
    ] * needs[1]
    assert [tuple(grad.shape) for grad in OPS.gradients(*args)] == shapes


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
