"""Layers are the operations that they promise, bit for bit: results and gradients, every shape, dtype and recipe."""

import grouped_products
import pytest
import torch
import torch.nn.functional as F
from every_layer import Halves
from helpers import (
    FP8,
    FP8_ROWS,
    FULL,
    HADAMARD,
    NVFP4,
    PER_EXPERT,
    RECIPES,
    STOCHASTIC,
    assert_same_tensors,
    every_recipe,
    named_results,
    replace,
    tokens,
    weight,
)
from products_by_hand import EPS, Norm, ProductsByHand, SwiGLU
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import linears_and_experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP

WIDTH, HIDDEN = 129, 96


class Grouped(nn.Module):
    def __init__(self, experts: int, n: int = 41, k: int = 72):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, n, k))

    def forward(self, x, ends):
        return F.grouped_mm(x, self.weight.mT, offs=ends)


def norm_by_hand(m, x, fused: bool, dtype=None):
    y = Norm.apply(x, m.norm.weight, getattr(m.norm, "bias", None), dtype or x.dtype) if fused else m.norm(x)
    return m.linear(y)


def swiglu(gate, up, fused: bool = True):
    return SwiGLU.apply(gate, up) if fused else F.silu(gate) * up


def experts_by_hand(m, x, ends):
    gate_up = F.grouped_mm(x, m.gate_up.mT, offs=ends)
    return F.grouped_mm(swiglu(*gate_up.chunk(2, -1)), m.down.mT, offs=ends)


# (features -> layer, what it promises of a plain layer with the same values). fused: whether weights train in FP8.
DENSE = {
    "linear": (lambda k: nn.Linear(k, WIDTH), lambda m, x, fused: m(x)),
    "linear_no_bias": (lambda k: nn.Linear(k, WIDTH, bias=False), lambda m, x, fused: m(x)),
    "rms_norm_linear": (lambda k: NormLinear(k, WIDTH, eps=EPS), norm_by_hand),
    "layer_norm_linear": (lambda k: NormLinear(k, WIDTH, norm="layer", eps=EPS, bias=True), norm_by_hand),
    "swiglu_mlp": (
        lambda k: SwiGLUMLP(k, HIDDEN),
        lambda m, x, fused: m.down(swiglu(*m.gate_up(x).chunk(2, -1), fused)),
    ),
    "swiglu_mlp_of_odd_halves": (
        lambda k: SwiGLUMLP(k, 129, bias=True),
        lambda m, x, fused: m.down(swiglu(*m.gate_up(x).chunk(2, -1), fused)),
    ),
    "swiglu_linear": (
        lambda k: Halves(k, WIDTH, bias=True),
        lambda m, x, fused: m.linear(swiglu(*x.chunk(2, -1), fused)),
    ),
}
# The same of experts.
GROUPED = {
    "grouped": (Grouped, lambda m, x, ends: m(x, ends)),
    "swiglu_experts": (lambda e: SwiGLUExperts(e, 72, HIDDEN), experts_by_hand),
    "swiglu_experts_of_odd_halves": (lambda e: SwiGLUExperts(e, 72, 129), experts_by_hand),
}
CONFIGS = RECIPES | {
    "quantized": replace(FP8, master_weights=False),
    "nvfp4_quantized": replace(NVFP4, master_weights=False),
    "high_precision": replace(FP8, save_activations="high_precision"),
    "rows_high_precision": replace(FP8_ROWS, save_activations="high_precision"),
    "saved": replace(FP8, save_weights="quantized"),
    "hadamard": HADAMARD,
    "other_signs": replace(HADAMARD, hadamard=(1, -1) * 8, save_activations="high_precision"),
    "stochastic": STOCHASTIC,
    "full": FULL,
    "per_expert": PER_EXPERT,
    "per_expert_quantized": replace(PER_EXPERT, master_weights=False),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def pair(make, size: int, config, dtype=torch.float32, device="cpu") -> tuple[nn.Module, nn.Module]:
    """The layer converted and plain, with the same values."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = make(size).to(dtype)
        with torch.no_grad():
            for i, p in enumerate(layer.parameters()):
                p.copy_(weight(*p.shape, seed=i) / 64 if p.dim() > 1 else 1 + torch.randn(p.shape) / 8)
        made.append(layer.to(device))
    quantize_(made[0], config, filter_fn=linears_and_experts())
    return made[0], made[1]


def assert_by_hand(layers, by_hand, x, config, tail: int = 0, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of `run`, by itself the layer, are those of the operations; in a later pass too."""
    layer, plain = layers
    for use in range(2 if config.stochastic_rounding else 1):
        with torch.no_grad():
            out = (run or layer)(x)
        dy = tokens(*out.shape, seed=7).to(out)
        dy[len(dy) - tail :] = float("inf")
        with ProductsByHand([*plain.parameters()], config, use):
            expected = named_results(plain, x, dy, by_hand)
        got = named_results(layer, x, dy, run)
        assert_same_tensors(got, expected)
    return got


SHAPES = [(64,), (5, 64), (2, 3, 64), (2, 1, 4, 64), (0, 64), (2, 0, 64), (1, 64), (300, 64), (129, 200), (33, 66)]


@every_config
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_layers(name, shape, config, device):
    make, by_hand = DENSE[name]
    fused = config.activation_format is FP8.activation_format
    layers = pair(make, shape[-1], config, device=device)
    assert_by_hand(layers, lambda x: by_hand(layers[1], x, fused), tokens(*shape, device=device), config)


# A single matrix is not a stack of experts.
ROUTINGS = {name: routing for name, routing in grouped_products.ROUTINGS.items() if len(routing[0]) > 1}


@every_config
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("sizes", "tail"), ROUTINGS.values(), ids=ROUTINGS)
def test_experts(name, sizes, tail, config, device):
    assert_experts_by_hand(*GROUPED[name], sizes, tail, config, device=device)


def assert_experts_by_hand(
    make, by_hand, sizes, tail, config, k=72, dtype=torch.float32, weights=torch.float32, device="cpu"
):
    layer, plain = pair(make, len(sizes), config, weights, device)
    ends = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    x, count = tokens(sum(sizes) + tail, k, dtype=dtype, device=device), sum(sizes)
    # What no group has may hold anything.
    x[count:] = float("nan")
    run = {"run": lambda x: layer(x, ends)}
    got = assert_by_hand((layer, plain), lambda x: by_hand(plain, x, ends), x, config, tail, **run)
    assert not got["out"][count:].any() and not got["x"][count:].any()
    # Gradients of experts without tokens are exact zeros; NVFP4 may lose those of one with few.
    assert not any(p.grad[torch.tensor(sizes) == 0].any() for p in layer.parameters())
    assert dtype == torch.float16 or all(t.isfinite().all() for t in got.values())


# In NVFP4 the norms and SwiGLU are PyTorch's, which take tensors of one dtype.
OF_DTYPES = (
    [("linear", NVFP4)] + [(name, FP8) for name in DENSE] + [(name, c) for name in GROUPED for c in (FP8, NVFP4)]
)


@pytest.mark.parametrize("out_dtype", (None, torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("weights", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("name", "config"), OF_DTYPES)
def test_dtypes(name, config, dtype, weights, out_dtype):
    # Of two products, the first's would be the second's input.
    config = replace(config, out_dtype=None if "swiglu_" in name else out_dtype)
    if name in GROUPED:
        assert_experts_by_hand(*GROUPED[name], [9, 0, 5], 2, config, dtype=dtype, weights=weights)
        return
    make, by_hand = DENSE[name]
    layers = pair(make, 72, config, weights)
    got = assert_by_hand(layers, lambda x: by_hand(layers[1], x, True), tokens(9, 72, dtype=dtype), config)
    assert (got["out"].dtype, got["x"].dtype) == (config.out_dtype or dtype, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ("rms_norm_linear", "layer_norm_linear"))
def test_autocast_rounds_the_output_of_a_norm(name, dtype):
    """The norm reads its input as it is; of other layers autocast is a cast of the input (test_every_layer.py)."""
    layer, plain = pair(DENSE[name][0], 72, FP8)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    def by_hand(x):
        return norm_by_hand(plain, x, True, torch.bfloat16)

    got = assert_by_hand((layer, plain), by_hand, tokens(9, 72, dtype=dtype), FP8, run=run)
    assert (got["out"].dtype, got["x"].dtype) == (torch.bfloat16, dtype)


@every_recipe
@pytest.mark.parametrize("name", ("linear", "grouped"))
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")), ids=str)
@pytest.mark.parametrize("where", ("x", "weight", "dy"))
def test_values_that_are_not_finite(where, bad, name, config):
    """They reach what they reach in the operations, whose tests say what that is."""
    layer, plain = pair((DENSE | GROUPED)[name][0], 3 if name == "grouped" else 72, config)
    x, dy, ends = tokens(9, 72), tokens(9, plain.weight.shape[-2]), torch.tensor([4, 4, 9], dtype=torch.int32)
    with torch.no_grad():
        for t in (layer.weight, plain.weight) if where == "weight" else ({"x": x, "dy": dy}[where],):
            t[..., 1, 6] = bad

    def run(module, x):
        return module(x, ends) if name == "grouped" else module(x)

    with ProductsByHand([*plain.parameters()], config):
        expected = named_results(plain, x, dy, lambda x: run(plain, x))
    assert not all(t.isfinite().all() for t in expected.values())
    assert_same_tensors(named_results(layer, x, dy, lambda x: run(layer, x)), expected)


@every_recipe
@pytest.mark.parametrize("name", ("linear_no_bias", "grouped"))
def test_non_contiguous_inputs_and_expanded_gradients(name, config):
    """`out.sum().backward()` gives the layer an expanded scalar. Sums of a norm or a bias have another order."""
    layer, _ = pair((DENSE | GROUPED)[name][0], 3 if name == "grouped" else 72, config)
    x, ends = tokens(72, 9), [torch.tensor([4, 4, 9], dtype=torch.int32)] if name == "grouped" else []

    def run(x):
        return layer(x, *ends)

    width = run(x.t()).shape[1]
    for dy in (tokens(width, 9).t(), torch.ones(()).expand(9, width)):
        got, expected = (
            named_results(layer, x.t(), dy, run),
            named_results(layer, x.t().contiguous(), dy.contiguous(), run),
        )
        assert_same_tensors({part: t.contiguous() for part, t in got.items()}, expected)
