"""An observer sees what layers multiply: by that and nothing else their weights' gradients can be computed again."""

from __future__ import annotations

import pytest
import torch
from every_layer import every_model, make, tokens
from helpers import FP8, both_formats, mlp, weight

from torchao_blockwise import linear
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.nn.activations import observe
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


class Seen:
    """(weight, x, groups, dy) of each product, in the order of forward passes."""

    def __init__(self):
        self.products = []

    def __call__(self, weight, x, how, grad_enabled):
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


def gradients_of(model, x):
    out = model(x)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@both_formats
@every_model
def test_gradients_follow_from_what_is_seen(config, model):
    name, model = model, make(model, config)
    x = tokens(name).requires_grad_()
    expected = gradients_of(model, x)
    model.zero_grad()
    with Seen() as seen:
        got = gradients_of(model, x)
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
