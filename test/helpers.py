"""Recipes, quantized tensors, models and GEMMs by hand for tests of tensors, layers and conversion."""

import contextlib
import dataclasses
import io
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    ops,
)
from torchao_blockwise import NVFP4TrainingConfig as NVFP4Config
from torchao_blockwise.tensors import weight_operands
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

FP8, FP8_POW2, FP8_ROWS, NVFP4 = (
    BlockwiseFP8TrainingConfig(),
    BlockwiseFP8TrainingConfig(power_of_2_scales=True),
    BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128"),
    NVFP4Config(hadamard=False, stochastic_rounding=False),
)
HADAMARD, STOCHASTIC, FULL = NVFP4Config(stochastic_rounding=False), NVFP4Config(hadamard=False), NVFP4Config(seed=7)
PER_EXPERT = NVFP4Config(seed=7, scale_per_expert=True)
RECIPES = {"fp8": FP8, "fp8_pow2": FP8_POW2, "fp8_1x128": FP8_ROWS, "nvfp4": NVFP4}
every_recipe = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
both_formats = pytest.mark.parametrize("config", (FP8, NVFP4), ids=("fp8", "nvfp4"))
both_masters = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))

QUANTIZERS = {
    "fp8": BlockwiseFP8Tensor.from_hp,
    "fp8_pow2": lambda w, **kw: BlockwiseFP8Tensor.from_hp(w, power_of_2_scales=True, **kw),
    "nvfp4": NVFP4Tensor.from_hp,
    "nvfp4_1x16": lambda w, **kw: NVFP4Tensor.from_hp(w, block_size=(1, 16), **kw),
}
every_kind = pytest.mark.parametrize("from_hp", QUANTIZERS.values(), ids=QUANTIZERS)


def replace(config, **changes):
    return dataclasses.replace(config, **changes)


def weight(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return random_tensor(*shape, dtype=dtype, seed=seed)


def assert_same(got, expected, names=None) -> None:
    """The tensors of one list, of which some may be None, are those of the other, bit for bit."""
    got, expected = list(got), list(expected)
    for name, a, b in zip(names or range(len(got)), got, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_bitwise_equal(a, b, str(name))


def assert_same_tensors(got: dict, expected: dict) -> None:
    """The dicts have the same names and, bit for bit, the same tensors."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(got[name].detach(), x.detach(), name)


def assert_same_gradients(got: nn.Module, expected: nn.Module) -> None:
    names = [name for name, _ in expected.named_parameters()]
    assert_same(*([p.grad for p in model.parameters()] for model in (got, expected)), names)


def mlp(config=None, features=(64, 160, 32), bias: bool = True, dtype=torch.float32, seed: int = 0) -> nn.Sequential:
    """Linear, GELU, Linear; converted if there is a config."""
    torch.manual_seed(seed)
    inner, hidden, outer = features
    model = nn.Sequential(nn.Linear(inner, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, outer, bias=bias))
    return converted(model.to(dtype), config)


def converted(model: nn.Module, config, filter_fn=None) -> nn.Module:
    """The model, converted in place if there is a config."""
    if config is not None:
        quantize_(model, config, filter_fn=filter_fn)
    return model


class Tied(nn.Module):
    """An embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.lm_head = nn.Linear(64, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def saved_and_loaded(x, weights_only: bool = True):
    """`x` through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def linear_by_hand(x, hp, bias, dy, config, rounding=None):
    """(output, grad_input, grad_weight, grad_bias) of a layer, composed of the operations that it promises.

    rounding: the random bits of the gradient's copies, an `ops.StochasticRounding`.
    """

    def quantize(t, fmt, **kwargs):
        return ops.quantize(t, fmt, power_of_2_scales=config.power_of_2_scales, **kwargs)

    fmt, hadamard = config.activation_format, getattr(config, "hadamard", False)
    along_tokens = {"columnwise": True, "hadamard": hadamard, "padded": True}
    tokens, gradients = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    w = quantize(hp, config.weight_format).rowwise
    output = ops.matmul(quantize(tokens, fmt).rowwise, w, out_dtype=config.out_dtype or x.dtype, bias=bias)
    of_dy = quantize(gradients, fmt, stochastic=rounding, **along_tokens)
    grad_input = ops.matmul(of_dy.rowwise, ops.transpose(w, columns=hp.shape[1]), out_dtype=x.dtype)
    columnwise = quantize(tokens, config.grad_weight_format, rowwise=False, **along_tokens).columnwise
    grad_weight = ops.matmul(of_dy.columnwise, columnwise, out_dtype=hp.dtype)
    grad_bias = None if bias is None else gradients.float().sum(0).to(bias.dtype)
    return output.view(dy.shape), grad_input.view(x.shape), grad_weight, grad_bias


def tokens(*shape: int, dtype=torch.float32, seed: int = 3, device="cpu") -> torch.Tensor:
    return random_tensor(1, *shape, dtype=dtype, seed=seed, device=device)[0] / 64


def named_results(layer, x, dy=None, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of one pass from fresh gradients, by `run`, if it is not the layer."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = (layer if run is None else run)(x)
    out.backward(torch.ones_like(out) if dy is None else dy)
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def forward_backward(layer, x, run=None) -> tuple[torch.Tensor, ...]:
    """`named_results` without the names: (output, grad_input, grad of each parameter)."""
    return tuple(named_results(layer, x, run=run).values())


@contextlib.contextmanager
def weight_calls():
    """Counts what is really computed of master weights for products.

    `.quantize`: from values, `.columnwise` of them straight to columnwise; `.transpose`: launches from kept copies.
    """
    calls = types.SimpleNamespace(quantize=0, columnwise=0, transpose=0)

    def quantize_by(values, options, **kwargs):
        calls.quantize += 1
        calls.columnwise += options.columnwise
        return ops.quantize_by(values, options, **kwargs)

    def transpose(*args, **kwargs):
        calls.transpose += 1
        return ops.transpose(*args, **kwargs)

    counting = types.SimpleNamespace(quantize_by=quantize_by, transpose=transpose, Backend=ops.Backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_operands, "ops", counting)
        yield calls


def master(*shape: int, config=FP8, dtype=torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(MasterWeightTensor(weight(*shape, dtype=dtype, seed=seed), config))


class NoHostReads(TorchDispatchMode):
    """Raises where an operation gives the host a value of a tensor, or has a size that depends on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "_unique", "masked_select", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func._schema.name.split("::")[1].startswith(self.FORBIDDEN), func
        out = func(*args, **(kwargs or {}))
        assert not any(isinstance(x, (int, float, bool)) for x in (out if isinstance(out, tuple) else (out,))), func
        return out
