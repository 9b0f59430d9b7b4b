"""The linear layer: no features, quantized Parameters, and what it refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, assert_same, both_formats, converted, every_recipe, forward_backward, tokens, weight
from torch import nn

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, linear


@every_recipe
@pytest.mark.parametrize("n, k", ((0, 32), (32, 0), (0, 0)))
def test_layers_without_features(config, n, k):
    layer, x = converted(nn.Linear(k, n), config), torch.randn(2, 5, k, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, layer.bias.expand(2, 5, n))
    out.sum().backward()
    assert x.grad.shape == x.shape and layer.weight.grad.shape == (n, k) and not x.grad.any()


@both_formats
def test_a_nested_tensor_is_the_matrix_of_its_tokens(config):
    layer, parts = converted(nn.Linear(72, 40), config), [tokens(n, 72, seed=n) for n in (3, 9, 1)]
    expected = forward_backward(copy.deepcopy(layer), torch.cat(parts))
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = layer(x)
    assert out.shape[:2] == x.shape[:2]
    out.values().sum().backward()
    assert_same((out.values().detach(), x.grad.values(), layer.weight.grad, layer.bias.grad), expected)


QUANTIZED = {"fp8": BlockwiseFP8Tensor, "nvfp4": NVFP4Tensor}
X = torch.ones(3, 72)
ERRORS = {
    "f64_x": (lambda w: F.linear(X.double(), w), TypeError, "bfloat16, float16 or float32, got torch.float64; cast it"),
    "complex_x": (lambda w: F.linear(X + 0j, w), TypeError, "got torch.complex64; cast it first"),
    "sparse_x": (lambda w: F.linear(X.to_sparse(), w), TypeError, r"dense, got torch.sparse_coo; .*to_dense\(\)"),
    "nested_x": (
        lambda w: F.linear(torch.nested.nested_tensor([X, X[:1]]), w),
        TypeError,
        "x must be dense, got a nested tensor in torch.strided; use layout=torch.jagged",
    ),
    "tuple_x": (lambda w: linear((X, X), w), TypeError, "x must be a tensor, got a tuple"),
    "k": (lambda w: F.linear(X[:, 1:], w), ValueError, r"must agree in K, got \[3, 71\] and \[40, 72\]"),
    "scalar": (lambda w: F.linear(torch.ones(()), w), ValueError, r"must agree in K, got \[\] and \[40, 72\]"),
    "int_bias": (lambda w: F.linear(X, w, torch.ones(40).int()), TypeError, "bias must be bfloat16, float16 or"),
    "bias": (lambda w: F.linear(X, w, X[0, :39]), ValueError, r"bias must be \[N\] = \[40\], got shape \[39\]"),
    "bias_2d": (lambda w: F.linear(X, w, X[:1, :40]), ValueError, r"got shape \[1, 40\]"),
    "weight_3d": (
        lambda w: F.linear(X, w[None] if isinstance(w, MasterWeightTensor) else w.from_hp(weight(40, 72)[None])),
        ValueError,
        r"must be \[N, K\], got shape \[1, 40, 72\]",
    ),
    "device": (lambda w: F.linear(X.to("meta"), w), ValueError, "x is on meta, weight on cpu; move one"),
    "one_row_blocks": (
        lambda w: linear(X, NVFP4Tensor.from_hp(weight(40, 72), block_size=(1, 16))),
        ValueError,
        r"blocks of \(1, 16\) cannot be transposed .* block_size=\(16, 16\)",
    ),
    "quantized_x": (lambda w: F.linear(w, X), TypeError, "only a weight can be a quantized tensor"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("kind", ("master", "fp8", "nvfp4"))
def test_wrong_inputs(call, error, message, kind):
    w = weight(40, 72)
    with pytest.raises(error, match=message):
        call(MasterWeightTensor(w, FP8) if kind == "master" else QUANTIZED[kind].from_hp(w))


@pytest.mark.parametrize("x", (X.double(), X[:, 1:], X.to("meta")), ids=("dtype", "k", "device"))
def test_wrong_inputs_of_a_model_name_the_layer(x):
    model = converted(nn.Sequential(nn.Linear(72, 40)), FP8)
    with pytest.raises((TypeError, ValueError), match=r"^linear: .*\(0\.weight\)"):
        model(x)
