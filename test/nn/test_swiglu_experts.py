"""SwiGLUExperts: weights of several recipes, in high precision, in a whole mixture, and refusals."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, assert_same_tensors, converted, named_results, tokens
from products_by_hand import SwiGLU
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchao_blockwise import NVFP4Tensor, experts
from torchao_blockwise.nn import SwiGLUExperts, grouped_linear, permute, swiglu_experts, unpermute
from torchao_blockwise.testing import relative_error

DIM, HIDDEN = 64, 96
# Ends of the groups, and tokens.
ROUTINGS = {"ragged": ((5, 140, 150), 150), "tail": ((0, 4, 9), 40), "nobody": ((0, 0), 6), "no_token": ((0, 0), 0)}


def experts_of(config, count: int, dim: int = DIM, hidden: int = HIDDEN) -> SwiGLUExperts:
    torch.manual_seed(0)
    return converted(SwiGLUExperts(count, dim, hidden), config, experts())


def inputs_of(routing):
    """(x, dy, group_ends) with NaN in the rows after the last group, which nothing may see."""
    ends, count = routing
    x, dy = tokens(count, DIM), tokens(count, DIM, seed=7)
    x[ends[-1] :], dy[ends[-1] :] = float("nan"), float("nan")
    return x, dy, torch.tensor(ends, dtype=torch.int32)


def results_of(module, x, dy, ends, run=None):
    call = module if run is None else run
    return named_results(module, x, dy, lambda x: call(x, ends))


def test_each_weight_keeps_its_recipe():
    module = experts_of(FP8, 3)
    assert repr(module) == "SwiGLUExperts(experts=3, dim=64, hidden=96)"
    module.down = experts_of(NVFP4, 3).down
    inputs = inputs_of(ROUTINGS["ragged"])

    def composed(x, ends):
        gate_up = grouped_linear(x, module.gate_up, ends)
        return grouped_linear(SwiGLU.apply(*gate_up.chunk(2, 1)), module.down, ends)

    assert_same_tensors(results_of(module, *inputs), results_of(module, *inputs, composed))


def test_it_is_made_on_a_device_in_a_dtype():
    made = SwiGLUExperts(2, 8, 4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.bfloat16)}


# --- in high precision ------------------------------------------------------------------------------------------------


def by_loop(module, x, ends):
    """Expert by expert, rows after the last group left out."""
    parts, start = [], 0
    for g, end in enumerate(ends.tolist()):
        gate, up = (x[start:end] @ module.gate_up[g].to(x.dtype).T).chunk(2, 1)
        parts.append((F.silu(gate) * up) @ module.down[g].to(x.dtype).T)
        start = end
    return torch.cat((*parts, torch.zeros_like(x[start:])))


@pytest.mark.parametrize("autocast", (False, True), ids=("plain", "autocast"))
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_unconverted_it_is_a_loop_over_experts(routing, autocast):
    module = experts_of(None, len(routing[0]))
    x, dy, ends = inputs_of(routing)
    expected = results_of(module, x, dy, ends, lambda x, ends: by_loop(module, x, ends))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = results_of(module, x, dy.bfloat16() if autocast else dy, ends)
    assert got["out"].dtype == (torch.bfloat16 if autocast else torch.float32)
    for name, value in expected.items():
        assert got[name].isfinite().all()
        assert relative_error(got[name], value) < (2e-2 if autocast else 1e-5), name


@pytest.mark.parametrize("which", ("gate_up", "down"))
def test_one_weight_alone_may_be_converted(which):
    module, plain = experts_of(None, 3), experts_of(None, 3)
    setattr(module, which, getattr(experts_of(FP8, 3), which))
    inputs = inputs_of(ROUTINGS["tail"])
    got, expected = results_of(module, *inputs), results_of(plain, *inputs)
    for name, value in expected.items():
        assert 0 < relative_error(got[name], value) < 0.1, name


# --- in a layer ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A whole mixture: router, permute, experts, unpermute."""

    def __init__(self, config, experts: int, top_k: int, dim: int = DIM, hidden: int = HIDDEN):
        super().__init__()
        self.top_k = top_k
        self.experts = experts_of(config, experts, dim, hidden)
        self.router = nn.Parameter(torch.randn(experts, dim))

    def forward(self, x):
        weights, chosen = F.linear(x, self.router).softmax(-1).topk(self.top_k, -1)
        tokens, source, group_ends = permute(x, chosen, self.router.shape[0])
        return unpermute(self.experts(tokens, group_ends), source, self.top_k, weights)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("config", (FP8, NVFP4, None), ids=("fp8", "nvfp4", "high_precision"))
def test_a_layer_compiles_to_one_graph_for_every_routing(config):
    # PyTorch traces its own grouped GEMM only in bf16.
    dtype = torch.bfloat16 if config is None else torch.float32
    layer, counter = Layer(config, 4, 2).to(dtype), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)

    def run(x):
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(x)

    for count in (300, 300, 517, 1024):
        x = torch.randn(count, DIM, dtype=dtype)
        assert_same_tensors(named_results(layer, x, run=run), named_results(layer, x))
    assert counter.frame_count == 1


# --- refusals ---------------------------------------------------------------------------------------------------------

X, ENDS = torch.zeros(6, DIM), torch.tensor([2, 6], dtype=torch.int32)
GATE_UP, DOWN = torch.zeros(2, 2 * HIDDEN, DIM), torch.zeros(2, DIM, HIDDEN)


@pytest.mark.parametrize(
    "args, error, message",
    (
        ((X.int(), GATE_UP, DOWN), TypeError, "swiglu_experts: x must be bfloat16, float16 or float32, got"),
        ((X[None], GATE_UP, DOWN), ValueError, r"x must be \[M, K\], gate_up \[E, 2H, K\] and down \[E, K, H\], got"),
        ((X, GATE_UP[0], DOWN), ValueError, r"gate_up \[E, 2H, K\]"),
        ((X, GATE_UP[:, :HIDDEN], DOWN), ValueError, "must agree"),
        ((X, GATE_UP[:1], DOWN), ValueError, "must agree"),
        ((X[:, :5], GATE_UP, DOWN), ValueError, "must agree"),
        ((X, GATE_UP, NVFP4Tensor.from_hp(DOWN, block_size=(1, 16))), ValueError, r"down with blocks of \(1, 16\)"),
        ((X, GATE_UP.to("meta"), DOWN), ValueError, "one device, got x on cpu, gate_up on meta, down on cpu; move"),
    ),
)  # fmt: skip
def test_refusals(args, error, message):
    with pytest.raises(error, match=message):
        swiglu_experts(*args, ENDS)


@pytest.mark.parametrize("config", (FP8, None), ids=("fp8", "high_precision"))
def test_malformed_ends_are_refused_on_a_cpu(config):
    messages = {(3, 2): r"group_ends\[1\] = 2", (6,): r"group_ends must be \[E\] = \[2\], got shape \[1\]"}
    for ends, message in messages.items():
        with pytest.raises(ValueError, match=message):
            experts_of(config, 2)(X, torch.tensor(ends, dtype=torch.int32))
