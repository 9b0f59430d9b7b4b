"""nn.permute and nn.unpermute: gradients by autograd's own formulas, under torch.compile, and what is saved."""

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.nn import permute, unpermute

EXPERTS, TOP_K, WIDTH = 6, 3, 24


def routing(tokens: int):
    """(x, expert ids with one of no expert, router weights)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, 1).indices
    ids[::5, 1] = EXPERTS
    return torch.randn(tokens, WIDTH, generator=generator), ids, torch.rand(tokens, TOP_K, generator=generator)


def layer(x, ids, weights):
    """A mixture whose expert is a tanh."""
    tokens, source, _ = permute(x, ids, EXPERTS)
    return unpermute(tokens.tanh(), source, ids.shape[1], weights)


def gradients(function, x, ids, weights):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = function(x, ids, weights)
    (out * torch.arange(1.0, 1 + out.shape[1])).sum().backward()
    return out.detach(), x.grad, weights.grad


@pytest.mark.parametrize("tokens", (0, 1, 33), ids=str)
def test_gradients_are_those_of_indexing(tokens):
    x, ids, weights = (t.double() if t.is_floating_point() else t for t in routing(tokens))

    def by_indexing(x, ids, weights):
        return (x.tanh()[:, None] * weights[..., None]).sum(1)

    expected = gradients(by_indexing, x, ids, weights)
    for got, want in zip(gradients(layer, x.float(), ids, weights.float()), expected):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_dtypes_of_gradients_are_those_of_what_they_belong_to():
    x, ids, weights = routing(9)
    out, dx, dweights = gradients(layer, x.bfloat16(), ids, weights.half())
    assert (out.dtype, dx.dtype, dweights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("weighted", (False, True), ids=("constant", "learned"))
def test_y_is_saved_for_weights_that_learn_alone(weighted):
    x, ids, weights = routing(11)
    tokens, source, _ = ops.permute(x, ids, EXPERTS)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        unpermute(tokens.requires_grad_(), source, TOP_K, weights.requires_grad_(weighted))
    assert (tokens.shape in saved) == weighted


def test_group_ends_and_source_have_no_gradient():
    x, ids, _ = routing(4)
    _, source, group_ends = permute(x.requires_grad_(), ids, EXPERTS)
    assert not source.requires_grad and not group_ends.requires_grad


def test_second_derivatives_are_refused():
    x, ids, weights = routing(4)
    out = layer(x.requires_grad_(), ids, weights)
    with pytest.raises(NotImplementedError, match="unpermute: double backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_batched_gradients_are_refused():
    x, ids, weights = routing(4)
    out = layer(x.requires_grad_(), ids, weights)
    with pytest.raises(NotImplementedError, match="unpermute: a batch of gradients"):
        torch.autograd.grad(out, x, torch.randn(3, *out.shape), is_grads_batched=True)
