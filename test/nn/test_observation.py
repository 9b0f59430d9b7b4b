"""An observer sees what layers multiply: by that and nothing else their weights' gradients can be computed again."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, both_formats, mlp, weight
from shared_inputs import attention
from swiglu_layers import experts_of
from torchao.quantization import quantize_

from torchao_blockwise import NormLinear, linear
from torchao_blockwise.nn import SwiGLUMLP, grouped_linear, swiglu_linear
from torchao_blockwise.nn.observation import observe
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")

TOKENS = 50


class Seen:
    """(weight, x, groups, dy) of each product, in the order of forward passes."""

    def __init__(self):
        self.products = []

    def __call__(self, weight, x, how):
        product = [weight, x, how.groups, None]
        self.products.append(product)

        def see_gradient(dy):
            assert product[3] is None, "told twice"
            product[3] = dy

        return see_gradient

    def __enter__(self):
        assert observe(self) is None
        return self

    def __exit__(self, *exception):
        assert observe(None) is self


def converted(module, config):
    quantize_(module, config)
    return module


def run_linear(config):
    model = mlp(config)
    return model, lambda x: model(x), 64


def run_shared(config):
    model = attention(config)
    return model, lambda x: model(x), 160


def run_norm(config):
    model = converted(NormLinear(64, 96, bias=True), config)
    return model, lambda x: model(x), 64


def run_swiglu_linear(config):
    model = converted(torch.nn.Linear(32, 48), config)
    return model, lambda x: swiglu_linear(*x.chunk(2, -1), model.weight, model.bias), 64


def run_swiglu_mlp(config):
    model = converted(SwiGLUMLP(64, 96), config)
    return model, lambda x: model(x), 64


ENDS = torch.tensor([7, 7, 31, 45], dtype=torch.int32)


def run_experts(config):
    model = experts_of(config, 4)
    return model, lambda x: model(x, ENDS), 64


RUNS = {"linear": run_linear, "shared": run_shared, "norm": run_norm, "swiglu_linear": run_swiglu_linear,
        "swiglu_mlp": run_swiglu_mlp, "experts": run_experts}  # fmt: skip


def gradients_of(model, run, x):
    out = run(x)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@both_formats
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients_follow_from_what_is_seen(config, run):
    torch.manual_seed(0)
    model, forward, features = run(config)
    x = weight(TOKENS, features, seed=2).requires_grad_()
    expected = gradients_of(model, forward, x)
    model.zero_grad()
    with Seen() as seen:
        got = gradients_of(model, forward, x)
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    assert sorted(id(product[0]) for product in seen.products) == sorted(map(id, weights.values()))
    for name in expected:
        assert_bitwise_equal(got[name], expected[name], name)
    for name, p in weights.items():
        x, groups, dy = next(product[1:] for product in seen.products if product[0] is p)
        p.grad = None
        (linear(x, p) if groups is None else grouped_linear(x, p, groups.ends)).backward(dy)
        assert_bitwise_equal(p.grad, expected[name], name)


def test_nobody_sees_what_runs_later():
    model = mlp(FP8)
    with Seen() as seen:
        model(weight(4, 64))
        assert len(seen.products) == 2
    model(weight(4, 64))
    assert len(seen.products) == 2


def test_compiled_layers_tell_nothing():
    model, x = mlp(FP8), weight(4, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with Seen() as seen:
        compiled(x).sum().backward()
    assert seen.products == []
    assert_bitwise_equal(compiled(x), model(x))
