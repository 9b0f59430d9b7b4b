"""NormLinear: the gradient of the norm, layers made of modules, and wrong use."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, converted, tokens
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import NormLinear, ops
from torchao_blockwise.nn.activations import NormInput
from torchao_blockwise.testing import relative_error

kinds = pytest.mark.parametrize("kind", ("rms", "layer"))
EPS = 1e-5


@kinds
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=lambda d: str(d)[6:])
def test_the_gradient_of_the_norm_is_pytorchs(dtype, kind, device):
    """Against autograd through F.rms_norm and F.layer_norm in fp64."""
    x, dy = tokens(33, 96, dtype=dtype, device=device), tokens(33, 96, dtype=dtype, seed=7, device=device)
    weight, bias = (tokens(1, 96, dtype=dtype, seed=s, device=device)[0] for s in (1, 2))
    statistics = ops.norm_statistics(x, kind, EPS)
    prepared = x, *statistics, weight, bias if kind == "layer" else None
    got = NormInput.backward(dy, prepared, None, [True, True, kind == "layer"])
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    if kind == "rms":
        F.rms_norm(leaves[0], (96,), leaves[1], EPS).backward(dy.double())
    else:
        F.layer_norm(leaves[0], (96,), leaves[1], leaves[2], EPS).backward(dy.double())
    for g, leaf, like in zip(got, leaves, (x, weight, bias)):
        assert (g is None) == (leaf.grad is None)
        if g is not None:
            assert g.dtype == like.dtype and relative_error(g, leaf.grad) < 2 * torch.finfo(dtype).eps


# --- made of modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", (nn.RMSNorm(64), nn.RMSNorm(64, eps=1e-3), nn.LayerNorm(64, bias=False),
                                  nn.LayerNorm(64, elementwise_affine=False), nn.RMSNorm(64, elementwise_affine=False)),
                         ids=("rms", "rms_eps", "layer_no_bias", "layer_bare", "rms_bare"))  # fmt: skip
def test_made_of_modules(norm):
    linear = nn.Linear(64, 96)
    layer = NormLinear.from_modules(norm, linear)
    assert layer.norm is norm and layer.linear is linear
    names = [f"norm.{name}" for name, _ in norm.named_parameters()]
    assert list(layer.state_dict()) == [*names, "linear.weight", "linear.bias"]
    x = tokens(33, 64)
    with torch.no_grad():
        plain = layer(x)
        assert torch.equal(plain, linear(norm(x)))
    quantize_(layer, FP8)
    assert 0 < relative_error(layer(x), plain) < 0.1
    assert relative_error(layer(x), linear(norm(x))) < 2e-2
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


made_of, LAYER = NormLinear.from_modules, converted(NormLinear(64, 8), FP8)
ERRORS = {
    "norm": (lambda: NormLinear(8, 8, norm="batch"), ValueError, "norm must be 'rms' or 'layer', got 'batch'"),
    "module": (lambda: made_of(nn.GroupNorm(2, 8), nn.Linear(8, 8)), TypeError, "got GroupNorm and Linear"),
    "features": (lambda: made_of(nn.RMSNorm(9), nn.Linear(8, 8)), ValueError, r"over in_features=8, got .*=\(9,\)"),
    "two_dims": (lambda: made_of(nn.LayerNorm((4, 8)), nn.Linear(8, 8)), ValueError, r"in_features=8, .*=\(4, 8\)"),
    "x": (lambda: LAYER(torch.ones(3, 65)), ValueError, "must agree in K"),
    "dtype": (lambda: LAYER(torch.ones(3, 64).double()), TypeError, "bfloat16, float16 or float32"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_wrong_use(call, error, message):
    with pytest.raises(error, match=message):
        call()
