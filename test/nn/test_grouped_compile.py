"""Experts whose routing changes with every step: one graph, no recompilation, nothing that waits for a device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FP8,
    NVFP4,
    assert_same,
    both_formats,
    every_recipe,
    recipes_and_variants,
    replace,
    weight,
    weight_calls,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import experts, ops
from torchao_blockwise.tensors.weight_operands import weight_options
from torchao_blockwise.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.usefixtures("no_interpreter", "fresh_dynamo")

E, DIM, HIDDEN = 4, 64, 96
ROUTINGS = ([75, 75, 75, 75], [300, 0, 0, 0], [1, 2, 0, 5], [0, 0, 0, 0], [129, 0, 171, 100])


class Experts(nn.Module):
    """An MLP an expert, over tokens that are sorted by expert; its forward pass takes the sizes of the groups."""

    def __init__(self, cast: bool = False):
        super().__init__()
        self.gate_up = nn.Parameter(weight(E, 2 * HIDDEN, DIM, seed=1) / 512)
        self.down = nn.Parameter(weight(E, DIM, HIDDEN, seed=2) / 512)
        self.cast = cast

    def forward(self, x, sizes):
        ends = sizes.cumsum(0, dtype=torch.int32)
        gate_up, down = (w.bfloat16() if self.cast else w for w in (self.gate_up, self.down))
        gate, up = F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)


def mlp(config, **options) -> Experts:
    module = Experts(**options)
    quantize_(module, config, filter_fn=experts())
    return module


def tokens(count: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(count)).to(dtype).requires_grad_()


def results(run, module, count: int, sizes, dtype=torch.float32):
    """(output, gradient of the tokens, gradients of the weights)."""
    module.zero_grad()
    x = tokens(count, dtype)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    out = run(x, torch.tensor(sizes))
    out.float().square().sum().backward()
    return out.detach(), x.grad, *(p.grad for p in module.parameters())


@recipes_and_variants(
    {"default": {}, "high_precision": {"save_activations": "high_precision"}, "quantized": {"master_weights": False}}
)
def test_routing_and_token_counts_do_not_recompile(config, variant):
    module, counter = mlp(replace(config, **variant)), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (400, 517):
            for sizes in ROUTINGS:
                assert_same(results(compiled, module, count, sizes), results(module, module, count, sizes))
    assert counter.frame_count == 1


@both_formats
@pytest.mark.parametrize("cast", (False, True), ids=("as_is", "cast"))
def test_weights_are_quantized_where_products_read_them_also_compiled(config, cast):
    module, dtype = mlp(config, cast=cast), torch.bfloat16 if cast else torch.float32
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    outputs = []
    for step in range(3):
        with weight_calls() as calls:
            for sizes in ROUTINGS[:3]:
                got, expected = (results(run, module, 300, sizes, dtype) for run in (compiled, module))
                assert_same(got, expected)
        # Two weights; forward and backward, six passes.
        assert (calls.quantize, calls.columnwise, calls.transpose) == (24, 12, 0), step
        outputs.append(got[0])
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_a_cast_copy_is_not_saved_for_backward():
    """The graph's backward takes the weight itself: the copy would be two bytes a parameter."""
    module, saved = mlp(FP8, cast=True), []
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(tokens(300, torch.bfloat16), torch.tensor(ROUTINGS[0]))
    assert saved and not [t for t in saved if t.dim() == 3 and t.dtype == torch.bfloat16]


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_inductor(config):
    """It rounds less between the products; gradients agree as far as a change of h by an ulp lets them."""
    module = mlp(config)
    compiled = torch.compile(module, fullgraph=True)
    for sizes in ROUTINGS[:3]:
        got, expected = (results(run, module, 300, sizes) for run in (compiled, module))
        for a, b in zip(got, expected):
            assert sqnr(a, b) > 60


class NoHostReads(TorchDispatchMode):
    """Raises where an operation gives the host a value of a tensor, or has a size that depends on one."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "unique", "masked_select", "bincount", "is_nonzero", "equal")

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, device = func._schema.name.split("::")[1], kwargs.get("device")
        assert not any(name.startswith(f) for f in self.FORBIDDEN), func
        assert device is None or torch.device(device).type == "meta", f"{func} copies to {device}"
        self.seen += func.namespace == "torchao_blockwise"
        out = func(*args, **kwargs)
        assert not any(isinstance(x, (int, float, bool)) for x in (out if isinstance(out, tuple) else (out,))), func
        return out


@every_recipe
@pytest.mark.parametrize("variant", ({}, {"save_activations": "high_precision"}, {"master_weights": False}),
                         ids=("default", "high_precision", "quantized"))  # fmt: skip
def test_no_step_asks_for_a_value(config, variant):
    """What the layer itself calls; inside of operations it is watched on a GPU, which a CPU's checks do not reach."""
    module, x, sizes = mlp(replace(config, **variant)), tokens(300), torch.tensor(ROUTINGS[0])
    with NoHostReads() as mode:
        module(x, sizes).sum().backward()
    assert mode.seen >= 8 and x.grad.any() and module.down.grad.any()


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
@pytest.mark.parametrize("columnwise", (False, True), ids=("output", "grad_input"))
@pytest.mark.parametrize("rounded_to", (None, torch.bfloat16), ids=("as_is", "rounded"))
def test_the_operation_on_values(config, columnwise, rounded_to):
    """Shapes that are known without running it, for any number of tokens; the schema's test cannot compare fp8."""
    hp, fmt = weight(3, 40, 72), config.activation_format
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    a = ops.quantize(torch.randn(9, 40 if columnwise else 72), fmt).rowwise
    options = weight_options(config, columnwise)
    options = (options.fmt.name, *options[1:], "", rounded_to)
    arguments = (*a, hp, *options, torch.bfloat16, None, ends, None, "reference")
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.torchao_blockwise.master_matmul.default, arguments, test_utils=tests)


@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
@pytest.mark.parametrize("grouped", (False, True), ids=("plain", "grouped"))
def test_the_operation_on_payloads(config, grouped):
    """What `columnwise_operand` and a product give; for any number of tokens, as above."""
    hp = weight(3, 40, 70) if grouped else weight(40, 70)
    ends = torch.tensor([2, 2, 9], dtype=torch.int32) if grouped else None
    a = ops.quantize(torch.randn(9, 40), config.activation_format, backend="reference").rowwise
    b = ops.quantize(hp, config.weight_format, backend="reference").rowwise
    arguments = (*a, *b, 70, True, torch.float32, None, ends, None, "reference")
    transposed = ops.transpose(b, columns=70, backend="reference")
    if grouped:
        wanted = ops.grouped_matmul(a, transposed, ends, out_dtype=torch.float32, backend="reference")
    else:
        wanted = ops.matmul(a, transposed, out_dtype=torch.float32, backend="reference")
    op = torch.ops.torchao_blockwise.quantized_matmul.default
    assert_bitwise_equal(op(*arguments), wanted)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=tests)
