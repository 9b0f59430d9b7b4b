"""SwiGLUExperts: the bits of the operations it is made of, every routing, memory, graphs, a layer without a sync."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_steps import capture, no_syncs
from helpers import FP8, FP8_POW2, NVFP4, replace, weight_calls
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, experts, ops
from torchao_blockwise.nn import SwiGLUExperts, grouped_linear, permute, swiglu_experts, unpermute
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")

RECIPES = {"fp8": FP8, "fp8_pow2": FP8_POW2, "nvfp4": NVFP4}
recipes = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
DIM, HIDDEN = 64, 96
# Ends of the groups, and tokens.
ROUTINGS = {
    "ragged": ((5, 140, 150), 150),
    "empty": ((0, 7, 7, 30, 30), 30),
    "one_expert": ((0, 0, 130), 130),
    "tail": ((4, 9, 12), 40),
    "nobody": ((0, 0), 6),
    "one_token": ((0, 1), 1),
    "no_token": ((0, 0, 0), 0),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def experts_of(config, count: int, dim: int = DIM, hidden: int = HIDDEN, dtype=torch.float32) -> SwiGLUExperts:
    """Converted by hand, so that this file tests layers alone."""
    torch.manual_seed(0)
    module = SwiGLUExperts(count, dim, hidden, dtype=dtype)
    for name, p in list(module.named_parameters()) if config is not None else ():
        if config.master_weights:
            weight = MasterWeightTensor(p.detach(), config)
        elif config.weight_format.has_global_scale:
            weight = NVFP4Tensor.from_hp(p.detach(), config=config)
        else:
            power_of_2 = config.power_of_2_scales
            weight = BlockwiseFP8Tensor.from_hp(p.detach(), power_of_2_scales=power_of_2, config=config)
        setattr(module, name, nn.Parameter(weight))
    return module


def inputs_of(routing, width: int = DIM, dtype=torch.float32, seed: int = 0):
    """(x, dy, group_ends) with NaN in the rows after the last group, which nothing may see."""
    ends, tokens = routing
    x, dy = (random_tensor(tokens, width, dtype=dtype, seed=seed + i) / 64 for i in (0, 7)) if tokens else (
        torch.empty(0, width, dtype=dtype) for _ in range(2)
    )  # fmt: skip
    x[ends[-1] :], dy[ends[-1] :] = float("nan"), float("nan")
    return x, dy, torch.tensor(ends, dtype=torch.int32)


def results(module, x, dy, group_ends, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of a pass from fresh gradients."""
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    out = (module if run is None else run)(x, group_ends)
    out.backward(dy.to(out.dtype))
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        assert_bitwise_equal(got[name], expected[name], name)


class SwiGLU(torch.autograd.Function):
    """`ops.swiglu` and its gradients."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return ops.swiglu(*gate_up.chunk(2, 1))

    @staticmethod
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        return torch.cat(ops.swiglu_backward(dh, *gate_up.chunk(2, 1)), 1)


def composed(module):
    """What the fused function promises to equal."""

    def run(x, group_ends):
        return grouped_linear(SwiGLU.apply(grouped_linear(x, module.gate_up, group_ends)), module.down, group_ends)

    return run


# --- bits -------------------------------------------------------------------------------------------------------------


@recipes
@routings
def test_bits_are_those_of_the_operations(routing, config):
    module = experts_of(config, len(routing[0]))
    x, dy, ends = inputs_of(routing)
    got = results(module, x, dy, ends)
    assert_same(got, results(module, x, dy, ends, composed(module)))
    assert all(t.isfinite().all() for t in got.values())
    last = routing[0][-1]
    assert not got["out"][last:].any() and not got["x"][last:].any()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    for name in ("gate_up", "down"):
        assert not got[name][sizes == 0].any(), "an expert without tokens has a gradient of exact zeros"
        assert got[name][sizes > 0].flatten(1).any(1).all()


@pytest.mark.parametrize("hidden", (96, 128, 130), ids=str)
def test_blocks_of_both_halves(hidden):
    """Blocks of the merged gradient hold parts of both; rows of the second half start off 16 bytes."""
    module = experts_of(FP8, 3, hidden=hidden)
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(module, *inputs), results(module, *inputs, composed(module)))


@pytest.mark.parametrize("weights", (torch.float32, torch.bfloat16), ids=lambda d: f"weights_{str(d)[6:]}")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=lambda d: str(d)[6:])
def test_dtypes(dtype, weights):
    module = experts_of(FP8, 3, dtype=weights)
    inputs = inputs_of(ROUTINGS["ragged"], dtype=dtype)
    got = results(module, *inputs)
    assert_same(got, results(module, *inputs, composed(module)))
    assert (got["out"].dtype, got["x"].dtype, got["down"].dtype) == (dtype, dtype, weights)


VARIANTS = {
    "high_precision": {"save_activations": "high_precision"},
    "reference": {"backend": "reference"},
    "no_master": {"master_weights": False},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("base", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_options_do_not_change_bits(base, variant):
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(experts_of(replace(base, **variant), 3), *inputs), results(experts_of(base, 3), *inputs))


def test_each_weight_keeps_its_own_recipe():
    module = experts_of(FP8, 3)
    module.down = experts_of(NVFP4, 3).down
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(module, *inputs), results(module, *inputs, composed(module)))


@pytest.mark.parametrize("save", ("fp8", "high_precision"))
@pytest.mark.parametrize("needs", ("x", "gate_up", "down", "none"))
def test_only_the_gradients_that_are_needed(needs, save):
    module = experts_of(replace(FP8, save_activations=save), 3)
    x, dy, ends = inputs_of(ROUTINGS["ragged"])
    expected = results(module, x, dy, ends)
    parts = {"x": x, **dict(module.named_parameters())}
    for name, t in parts.items():
        t.grad = None
        t.requires_grad_(name == needs)
    out = module(x, ends)
    assert out.requires_grad == (needs != "none")
    if needs != "none":
        out.backward(dy)
    for name, t in parts.items():
        assert (t.grad is not None) == (name == needs)
        if name == needs:
            assert_bitwise_equal(t.grad, expected[name], name)


def test_autocast_computes_in_its_dtype():
    module, (x, _, ends) = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, ends)
    assert_bitwise_equal(got, module(x.bfloat16(), ends))


def test_gradients_are_added_to_main_grad():
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    expected = results(module, *inputs)
    for p in module.parameters():
        p.main_grad = torch.ones(p.shape)
    got = results(module, *inputs)
    for name, p in module.named_parameters():
        assert got[name] is None and p.grad_added_to_main_grad
        torch.testing.assert_close(p.main_grad - 1, expected[name], atol=1e-6, rtol=1e-5)


def test_weights_are_quantized_where_products_read_them():
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    with weight_calls() as calls:
        results(module, *inputs)
    assert (calls.quantize, calls.columnwise, calls.transpose) == (4, 2, 0)
    with torch.no_grad():
        module.down.mul_(2)
    fresh = experts_of(FP8, 3)
    fresh.load_state_dict(module.state_dict())
    assert_same(results(module, *inputs), results(fresh, *inputs))


@recipes
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_quantize_converts_it(config, master_weights):
    config = replace(config, master_weights=master_weights)
    module, inputs = experts_of(None, 3), inputs_of(ROUTINGS["tail"])
    plain = {name: t.clone() for name, t in module.state_dict().items()}
    quantize_(module, config, filter_fn=experts())
    assert_same(results(module, *inputs), results(experts_of(config, 3), *inputs))
    saved = module.state_dict()
    assert saved.keys() == plain.keys()
    if master_weights:
        assert all(type(t) is torch.Tensor and torch.equal(t, plain[name]) for name, t in saved.items())
    fresh = SwiGLUExperts(3, DIM, HIDDEN)
    quantize_(fresh, config, filter_fn=experts())
    fresh.load_state_dict(saved)
    assert_same(results(fresh, *inputs), results(module, *inputs))


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
@routings
def test_unconverted_it_is_a_loop_over_experts(routing, autocast):
    module = experts_of(None, len(routing[0]))
    x, dy, ends = inputs_of(routing)
    expected = results(module, x, dy, ends, lambda x, ends: by_loop(module, x, ends))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = results(module, x, dy, ends)
    assert got["out"].dtype == (torch.bfloat16 if autocast else torch.float32)
    for name, value in expected.items():
        assert got[name].isfinite().all()
        assert relative_error(got[name], value) < (2e-2 if autocast else 1e-5), name


@pytest.mark.parametrize("which", ("gate_up", "down"))
def test_one_weight_alone_may_be_converted(which):
    module, plain = experts_of(None, 3), experts_of(None, 3)
    setattr(module, which, getattr(experts_of(FP8, 3), which))
    inputs = inputs_of(ROUTINGS["tail"])
    got, expected = results(module, *inputs), results(plain, *inputs)
    for name, value in expected.items():
        assert 0 < relative_error(got[name], value) < 0.1, name


def test_the_error_is_that_of_low_precision():
    exact, module = experts_of(None, 3, 256, 384).double(), experts_of(FP8, 3, 256, 384)
    x, dy, ends = torch.randn(300, 256), torch.randn(300, 256), torch.tensor([100, 110, 300], dtype=torch.int32)
    expected = results(exact, x.double(), dy.double(), ends, lambda x, ends: by_loop(exact, x, ends))
    got = results(module, x, dy, ends)
    for name, value in expected.items():
        assert relative_error(got[name], value) < 0.1, name


# --- memory, graphs, checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ("fp8", "high_precision"))
def test_saved_are_gate_up_and_one_byte_an_element_of_x_and_h(save):
    tokens, dim, hidden, ends = 300, 128, 256, torch.tensor([100, 110, 300], dtype=torch.int32)
    module = experts_of(replace(FP8, save_activations=save), 3, dim, hidden, torch.bfloat16)
    x, saved = torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x, ends)
    assert (x.data_ptr() in [t.data_ptr() for t in saved]) == (save == "high_precision")
    own = (x.data_ptr(), ends.data_ptr())
    plain = {t.data_ptr(): t for t in saved if type(t) is torch.Tensor and t.data_ptr() not in own}
    fmt = FP8.activation_format
    expected = 2 * tokens * 2 * hidden
    if save == "fp8":
        # Groups are padded to whole blocks: at most 127 tokens each.
        padded = (tokens + 3 * (fmt.block[1] - 1)) // fmt.block[1] * fmt.block[1]
        expected += fmt.nbytes(dim, padded) + fmt.nbytes(hidden, padded)
    assert sum(t.nbytes for t in plain.values()) == expected


@pytest.mark.parametrize("use_reentrant", (False, True), ids=("non_reentrant", "reentrant"))
def test_activation_checkpointing(use_reentrant):
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["tail"])
    got = results(module, *inputs, lambda x, ends: checkpoint(module, x, ends, use_reentrant=use_reentrant))
    assert_same(got, results(module, *inputs))


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


def step(layer, x, run=None):
    for p in layer.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    out = (layer if run is None else run)(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("config", (FP8, NVFP4, None), ids=("fp8", "nvfp4", "high_precision"))
def test_a_layer_compiles_to_one_graph_for_every_routing(config):
    # PyTorch traces its own product in bf16 alone.
    dtype = torch.bfloat16 if config is None else torch.float32
    layer, counter = Layer(config, 4, 2).to(dtype), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for count in (300, 300, 517, 1024):
        x = torch.randn(count, DIM, dtype=dtype)
        for got, expected in zip(step(layer, x, compiled), step(layer, x)):
            assert_bitwise_equal(got, expected)
    assert counter.frame_count == 1


def test_a_layer_is_the_mixture_that_it_says():
    """Against a loop over tokens and their experts, in fp64."""
    layer, x = Layer(FP8, 4, 2), torch.randn(40, DIM)
    weights, chosen = F.linear(x, layer.router).softmax(-1).topk(2, -1)
    gate_up, down = (p.hp.double() for p in (layer.experts.gate_up, layer.experts.down))
    expected = torch.zeros(40, DIM, dtype=torch.float64)
    for t in range(40):
        for weight, e in zip(weights[t].tolist(), chosen[t].tolist()):
            gate, up = (gate_up[e] @ x[t].double()).chunk(2)
            expected[t] += weight * (down[e] @ (F.silu(gate) * up))
    assert relative_error(layer(x), expected) < 0.1


def test_gradients_of_gradients_raise():
    module, (x, _, ends) = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="swiglu_experts: backward through backward"):
        torch.autograd.grad(module(x, ends).sum(), x, create_graph=True)


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
        ((X, GATE_UP.to("meta"), DOWN), ValueError, "x is on cpu, gate_up on meta, down on cpu; move them together"),
    ),
)  # fmt: skip
def test_refusals(args, error, message):
    with pytest.raises(error, match=message):
        swiglu_experts(*args, ENDS)


@pytest.mark.parametrize("config", (FP8, None), ids=("fp8", "high_precision"))
@pytest.mark.parametrize(
    "ends, error, message",
    (
        ([3, 2], ValueError, r"group_ends\[1\] = 2"),
        ([3, 7], ValueError, r"group_ends\[1\] = 7"),
        ([-1, 6], ValueError, r"group_ends\[0\] = -1"),
        ([6], ValueError, r"group_ends must be \[E\] = \[2\], got shape \[1\]"),
    ),
)
def test_malformed_ends_are_refused_on_a_cpu(config, ends, error, message):
    module = experts_of(config, 2)
    with pytest.raises(error, match=message):
        module(X, torch.tensor(ends, dtype=torch.int32))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_a_layer_step_without_a_sync_and_in_a_cuda_graph(config):
    layer, x = Layer(config, 8, 2, 256, 384).cuda(), torch.randn(1024, 256, device="cuda")
    step(layer, x)
    with no_syncs():
        step(layer, x)
    graph, captured = capture(lambda: step(layer, x))
    for seed in range(2):
        x.copy_(torch.randn(1024, 256, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = [t.clone() for t in captured]
        for a, b in zip(got, step(layer, x)):
            assert_bitwise_equal(a, b)
