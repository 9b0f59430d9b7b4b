"""`quantize_` with our configs: what changes, what stays, and that a model is converted whole or not at all."""

import copy

import pytest
import torch
import torch.nn.functional as F
from expert_modules import ENDS, X, kinds, named
from expert_modules import Model as ExpertModel
from helpers import (
    FP8,
    FP8_POW2,
    FULL,
    NVFP4,
    assert_same,
    both_formats,
    both_masters,
    converted,
    every_recipe,
    forward_backward,
    linear_by_hand,
    mlp,
    replace,
)
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    conversion_report,
    experts,
    is_linear,
    linear,
    linears_and_experts,
    recipe_state,
    skip_fqns,
    unconvert,
)
from torchao_blockwise.conversion import convert_module, handlers
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.testing import assert_bitwise_equal


def class_of(config) -> type:
    if config.master_weights:
        return MasterWeightTensor
    return BlockwiseFP8Tensor if config.weight_format is FP8.weight_format else NVFP4Tensor


@every_recipe
@both_masters
def test_what_the_filter_accepts_is_converted_and_nothing_else(config, masters):
    config, model = replace(config, master_weights=masters), ExpertModel()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    quantize_(model, config, linears_and_experts() & skip_fqns("lm_head"))
    attention = {f"layers.{i}.attention.weight": class_of(config) for i in range(2)}
    assert kinds(model) == named("up", "down", kind=class_of(config)) | attention
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    for name, p in model.named_parameters():
        if name in kinds(model):
            assert isinstance(p, nn.Parameter) and p.config == config and p.requires_grad
            assert p.shape == values[name].shape
        hp = p.hp if isinstance(p, MasterWeightTensor) else p.dequantize() if name in kinds(model) else p
        close = (hp - values[name]).norm() < 0.2 * values[name].norm()
        assert torch.equal(hp, values[name]) or (not masters and close)
    model(X, ENDS).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name in kinds(model))


def test_identity_gradient_attributes_and_hooks_stay():
    model, fired = ExpertModel(), []
    up, weight = model.layers[0].experts.up, model.layers[0].attention.weight
    for p in (up, weight):
        p.grad, p.tag = torch.ones_like(p), "mine"
        p.register_hook(lambda g: fired.append("grad"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
        p.register_hook(lambda g: fired.append("removed")).remove()
    model.lm_head.weight.requires_grad_(False)
    for config in (FP8, NVFP4):
        quantize_(model, config, is_linear() | experts())
        assert model.layers[0].experts.up is up and model.layers[0].attention.weight is weight
        for p in (up, weight):
            assert p.config == config and p.tag == "mine" and p.requires_grad
            assert type(p.grad) is torch.Tensor and (p.grad == 1).all()
        assert not model.lm_head.weight.requires_grad
    model(X, ENDS).sum().backward()
    assert fired == ["grad", "accumulated"] * 2


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch knows one dtype of gradients")
@both_masters
def test_the_dtype_of_gradients_stays(masters):
    """There and back, and with a gradient of that dtype."""
    layer = nn.Linear(64, 48, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = torch.ones(48, 64)
    quantize_(layer, replace(FP8, master_weights=masters))
    assert layer.weight.grad_dtype == layer.weight.grad.dtype == torch.float32
    layer.weight.grad = None
    layer(torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert unconvert(layer).weight.grad_dtype == torch.float32


def test_by_name():
    """Of layers, of modules of experts, and of single Parameters."""
    model = ExpertModel()
    names = {"layers.0.experts.up": FP8, r"re:layers\.1\.experts\.(up|down)": NVFP4, "lm_head.weight": FP8}
    quantize_(model, FqnToConfig({**names, r"re:.*\.attention": FP8_POW2}), filter_fn=None)
    assert {n: p.config for n, p in model.named_parameters() if n in kinds(model)} == {
        "layers.0.experts.up": FP8, "layers.1.experts.up": NVFP4, "layers.1.experts.down": NVFP4, "lm_head.weight": FP8,
        "layers.0.attention.weight": FP8_POW2, "layers.1.attention.weight": FP8_POW2,
    }  # fmt: skip
    assert model.layers[1].experts.up.layer == "layers.1.experts.up"
    assert all(type(v) is torch.Tensor for v in model.state_dict().values())
    model = converted(ExpertModel(), FqnToConfig({"layers.0.experts": FP8}))
    assert kinds(model) == named("up", "down", blocks=1)
    assert convert_module(model.layers[1].experts, NVFP4, parameter_name="down") is model.layers[1].experts
    assert kinds(model.layers[1]) == {"experts.down": MasterWeightTensor}


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("layers.0.experts.bias", r"bias: a Parameter of shape \[4, 64\] is not a weight \[E, N, K\]; exclude it"),
        ("lm_head.bias", r"a Parameter of shape \[16\] is not a weight \[N, K\]; exclude it"),
        ("layers", "  layers: a ModuleList is not an nn.Linear and has no expert weights"),
    ),
)
def test_names_of_no_weights_are_refused(name, message):
    model = ExpertModel()
    with pytest.raises(ValueError, match=message):
        quantize_(model, FqnToConfig({name: FP8}), filter_fn=None)
    assert kinds(model) == {}


@pytest.mark.parametrize("config", (FP8, NVFP4, replace(FP8, master_weights=False)), ids=("fp8", "nvfp4", "quantized"))
def test_a_call_looks_at_the_model_once(config, monkeypatch):
    """Once for each layer took 43 s for 2000 of them."""
    looks, look = [], handlers.held_parameters
    monkeypatch.setattr(handlers, "held_parameters", lambda model: looks.append(model) or look(model))
    model = converted(nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), config)
    assert len(looks) == 1 and all(layer.status == "converted" for layer in conversion_report(model).layers)


def test_each_call_sees_the_model_as_it_is():
    model = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), FP8)
    model.append(nn.Linear(32, 32))
    model.insert(0, nn.Linear(32, 32))
    model.append(nn.Linear(32, 32))
    model[4].weight = model[3].weight
    quantize_(model, FP8)
    assert all(type(layer.weight) is MasterWeightTensor for layer in model)
    assert [layer.weight.layer for layer in model] == [f"{i}.weight" for i in (0, 1, 2, 4, 4)]
    # Both holders of the tied weight save plain values.
    assert all(type(x) is torch.Tensor for x in model.state_dict().values())


def test_layers_that_the_filter_leaves_out_count_where_the_model_is_needed():
    """Random bits are those of a layer's place in the model; the other holder of a tied weight is converted too."""
    model = converted(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))), FULL, skip_fqns("1"))
    assert [state["stream"] for state in recipe_state(model).values()] == [0, 8]
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    quantize_(tied, FULL, filter_fn=skip_fqns("1"))
    assert isinstance(tied[1], ConvertedLinear)


def test_a_config_again_wraps_the_same_values():
    """The same one changes nothing, and may come while a graph holds the weights."""
    model = mlp(FP8)
    out, hp = model(torch.randn(3, 64)), model[0].weight.hp
    quantize_(model, replace(FP8))
    assert model[0].weight.hp is hp and len(model[0]._state_dict_hooks) == 1
    del out
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for config in (FP8_POW2, NVFP4, FP8):
        quantize_(model, config)
        assert model[0].weight.config == config and model[0].weight.quantized().format is config.weight_format
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        assert len(model[0]._state_dict_hooks) == len(model[0]._load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("train", (True, False), ids=("train", "eval"))
def test_attention_and_transformer_layers(train):
    """nn.MultiheadAttention uses out_proj's weight without calling it, so by default it stays as it is."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).train(train)
    plain, x = copy.deepcopy(layer), torch.randn(2, 5, 64)
    quantize_(layer, FP8)
    assert type(layer.linear1.weight) is MasterWeightTensor and type(layer.self_attn.out_proj.weight) is nn.Parameter
    with torch.set_grad_enabled(train):
        out, expected = layer(x), plain(x)
    assert 0 < (out - expected).norm() / expected.norm() < 0.05
    if train:
        out.sum().backward()
        assert layer.linear1.weight.grad is not None


def test_code_that_calls_f_linear_with_the_weight():
    """As models of Hugging Face do, positionally or by name."""
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    quantize_(layer, FP8)
    expected = linear_by_hand(x, layer.weight.hp, layer.bias, torch.zeros(3, 48), FP8)[0]
    for out in (F.linear(x, layer.weight, layer.bias), F.linear(input=x, weight=layer.weight, bias=layer.bias),
                linear(x, layer.weight, layer.bias), torch._C._nn.linear(x, layer.weight, layer.bias)):  # fmt: skip
        assert_bitwise_equal(out.detach(), expected)


@both_formats
def test_converted_on_meta_then_materialised(config):
    with torch.device("meta"):
        model = mlp(config)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    model.load_state_dict(mlp(seed=2).state_dict())
    assert_same(*(forward_backward(m, torch.ones(3, 64)) for m in (model, mlp(config, seed=2))))
