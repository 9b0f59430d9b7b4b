"""`quantize_` with our configs: what changes, what stays, and that a model is converted whole or not at all."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import (
    FP8,
    FP8_POW2,
    NVFP4,
    Tied,
    both_formats,
    every_recipe,
    forward_backward,
    linear_by_hand,
    mlp,
    replace,
)
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import prune
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    dry_run,
    is_linear,
    linear,
    skip_fqns,
    unconvert,
)
from torchao_blockwise.conversion import convert_module
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


def kinds(model) -> list[str]:
    return [type(p).__name__ for p in model.parameters()]


@every_recipe
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_linear_weights_are_converted_and_nothing_else(config, master_weights):
    config = replace(config, master_weights=master_weights)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Conv1d(4, 4, 1))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantize_(model, config)
    converted = model[1].weight
    expected = MasterWeightTensor if master_weights else {FP8.weight_format: BlockwiseFP8Tensor}.get(
        config.weight_format, NVFP4Tensor
    )  # fmt: skip
    assert type(converted) is expected and isinstance(converted, nn.Parameter) and converted.config == config
    assert [n for n, p in model.named_parameters() if type(p) is not nn.Parameter] == ["1.weight"]
    hp = converted.hp if master_weights else converted.dequantize()
    close = torch.equal(hp, values["1.weight"]) if master_weights else (hp - values["1.weight"]).abs().max() < 0.05
    assert close and all(torch.equal(p, values[n]) for n, p in model.named_parameters() if n != "1.weight")


def test_a_root_that_is_a_layer():
    layer = nn.Linear(64, 48)
    quantize_(layer, FP8)
    assert type(layer.weight) is MasterWeightTensor
    by_hand = nn.Linear(64, 48)
    assert convert_module(by_hand, FP8) is by_hand and type(by_hand.weight) is MasterWeightTensor


def test_identity_gradient_attributes_and_hooks_stay():
    model, fired = mlp(bias=False), []
    weight = model[0].weight
    weight.grad, weight.tag, weight.requires_grad = torch.ones(160, 64), "mine", True
    model[2].weight.requires_grad_(False)
    weight.register_hook(lambda g: fired.append("grad"))
    weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    removed = weight.register_hook(lambda g: fired.append("removed"))
    for config in (FP8, NVFP4):
        quantize_(model, config)
        assert model[0].weight is weight and weight.config == config and weight.tag == "mine"
        assert type(weight.grad) is torch.Tensor and (weight.grad == 1).all()
        assert weight.requires_grad and not model[2].weight.requires_grad
    removed.remove()
    model(torch.randn(3, 64)).sum().backward()
    assert fired == ["grad", "accumulated"]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch knows one dtype of gradients")
@pytest.mark.parametrize("master_weights", (True, False), ids=("masters", "quantized"))
def test_the_dtype_of_gradients_stays(master_weights):
    """There and back, and with a gradient of that dtype."""
    layer = nn.Linear(64, 48, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = torch.ones(48, 64)
    quantize_(layer, replace(FP8, master_weights=master_weights))
    assert layer.weight.grad_dtype == layer.weight.grad.dtype == torch.float32
    layer.weight.grad = None
    layer(torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert unconvert(layer).weight.grad_dtype == torch.float32


@both_formats
def test_an_optimizer_made_before_goes_on(config):
    model, late = mlp(seed=1), mlp(config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    quantize_(model, config)
    for m, o in ((model, optimizer), (late, torch.optim.AdamW(late.parameters(), lr=0.1))):
        m(torch.ones(3, 64)).square().sum().backward()
        o.step()
    assert_bitwise_equal(model[0].weight.hp, late[0].weight.hp)


@pytest.mark.parametrize("config", (FP8, replace(NVFP4, master_weights=False)), ids=("fp8", "nvfp4_quantised"))
def test_layers_that_share_a_weight_go_on_sharing(config):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    quantize_(model, config)
    assert model[0].weight is model[1].weight and model[0].weight.config == config
    model.append(model[0])
    quantize_(model, config)
    assert len(kinds(model)) == 3


def test_tied_embedding():
    model = Tied()
    quantize_(model, FP8)
    assert model.embed.weight is model.lm_head.weight and type(model.embed.weight) is MasterWeightTensor
    assert type(model.state_dict()["embed.weight"]) is torch.Tensor


def test_fqn_to_config():
    model = Tied(blocks=3)
    quantize_(model, FqnToConfig({"lm_head": FP8, r"re:blocks\.[01]": NVFP4}), filter_fn=None)
    assert model.lm_head.weight.config == FP8 and [b.weight.config for b in model.blocks[:2]] == [NVFP4, NVFP4]
    assert type(model.blocks[2].weight) is nn.Parameter
    assert all(type(v) is torch.Tensor for v in model.state_dict().values())
    with pytest.raises(ValueError, match=r"  blocks: a ModuleList is not an nn.Linear and holds no experts"):
        quantize_(model, FqnToConfig({"blocks": FP8}), filter_fn=None)


def test_the_same_config_again_changes_nothing():
    model = mlp(FP8)
    model(torch.randn(3, 64))
    hps = [p.hp for p in (model[0].weight, model[2].weight)]
    quantize_(model, replace(FP8))
    assert all(a is b for a, b in zip(hps, [model[0].weight.hp, model[2].weight.hp], strict=True))
    assert len(model[0]._state_dict_hooks) == 1


def test_another_config_wraps_the_same_values_again():
    model = mlp(FP8)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for config in (FP8_POW2, NVFP4, FP8):
        quantize_(model, config)
        assert model[0].weight.config == config and model[0].weight.quantized().format is config.weight_format
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        assert len(model[0]._state_dict_hooks) == len(model[0]._load_state_dict_pre_hooks) == 1


class OwnParameter(nn.Parameter):
    pass


def _parametrized():
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))


def _pruned():
    return prune.random_unstructured(nn.Linear(64, 64), "weight", amount=0.5)


def _own_parameter():
    layer = nn.Linear(64, 64)
    layer.weight = OwnParameter(layer.weight.data)
    return layer


def _weakly_held():
    layer = nn.Linear(64, 64)
    layer.held = weakref.ref(layer.weight)
    return layer


def _viewed():
    layer = nn.Linear(64, 64)
    layer.held = layer.weight.t()
    return layer


def _quantised(config):
    layer = nn.Linear(64, 64)
    quantize_(layer, config)
    return layer


FAILURES = {
    "complex": (lambda: nn.Linear(64, 64, dtype=torch.complex64), "its weight is torch.complex64; cast it to bfloat16"),
    "double": (lambda: nn.Linear(64, 64, dtype=torch.float64), "its weight is torch.float64; cast it to bfloat16"),
    "lazy": (lambda: nn.LazyLinear(64), "its weight is not initialized yet; run one forward pass first"),
    "parametrized": (_parametrized, r"not a Parameter \(parametrized or pruned\?\); remove the parametrization first"),
    "pruned": (_pruned, r"not a Parameter \(parametrized or pruned\?\)"),
    "quantizes_itself": (
        lambda: qat.Linear(64, 64, qconfig=get_default_qat_qconfig()),
        r"Linear of torch\.ao\.nn\.qat\.modules quantizes its weight by itself",
    ),
    "own_parameter": (_own_parameter, "its weight is a OwnParameter; convert first, then shard or wrap"),
    "non_linear": (lambda: nn.Conv1d(4, 4, 1), "a Conv1d is not an nn.Linear and holds no experts"),
    "quantised": (
        lambda: _quantised(replace(FP8, master_weights=False)),
        "a BlockwiseFP8Tensor already; convert it once",
    ),
    "weak_reference": (_weakly_held, "a weak reference to its weight; convert before torch.compile"),
    "view": (_viewed, "a view of its weight or the graph of a forward pass is alive; drop it"),
    "attention": (
        lambda: nn.MultiheadAttention(64, 2).out_proj,
        "nn.MultiheadAttention uses its weight without calling it",
    ),
}


def _float8():
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(nn.Linear(64, 64))


def _fake_quantized():
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    return FakeQuantizedLinear(64, 64, weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32))


def _derived():
    layer = _fake_quantized()
    layer.__class__ = type("Mine", (type(layer),), {"forward": lambda self, x: type(layer).forward(self, x)})
    return layer


def _of_transformers():
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import FP8Linear

    return FP8Linear(64, 64, block_size=(32, 32))


def _bit_linear():
    pytest.importorskip("transformers")
    from transformers.integrations.bitnet import AutoBitLinear

    return AutoBitLinear(64, 64)


def _of_bitsandbytes(name):
    return lambda: getattr(pytest.importorskip("bitsandbytes").nn, name)(64, 64)


@pytest.mark.parametrize(
    ("make", "reason"),
    (
        (_float8, r"Float8Linear of torchao\..* quantizes its weight by itself"),
        (_fake_quantized, r"FakeQuantizedLinear of torchao\..* quantizes its weight by itself"),
        (_derived, r"FakeQuantizedLinear of torchao\..* quantizes its weight by itself"),
        (_of_transformers, "its weight is torch.float8_e4m3fn, codes whose scales lie elsewhere"),
        (_bit_linear, r"AutoBitLinear of transformers\..* quantizes its weight by itself"),
        (_of_bitsandbytes("Linear8bitLt"), r"Linear8bitLt of bitsandbytes\..* quantizes its weight by itself"),
        (_of_bitsandbytes("Linear4bit"), r"Linear4bit of bitsandbytes\..* quantizes its weight by itself"),
    ),
    ids=("float8", "qat", "derived", "fp8_linear", "bitnet", "8bit", "4bit"),
)
def test_layers_that_quantize_by_themselves_are_refused(make, reason):
    model = nn.Sequential(nn.Linear(64, 64), make())
    before = state(model)
    with pytest.raises(ValueError, match=f"nothing was changed.*\n  1: {reason}"):
        quantize_(model, FP8)
    assert state(model) == before


def state(model):
    """All that a conversion may touch: modules, parameter objects, types, bits and hooks."""
    return (
        [
            (name, id(m), type(m), len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks))
            for name, m in model.named_modules()
        ],
        [(name, id(p), type(p), p.requires_grad) for name, p in model.named_parameters()],
        # The Parameters themselves: a pickle names the memory, and values that a state dict decodes are a copy.
        {n: pickle.dumps(v) for n, v in model.named_parameters() if not isinstance(v, nn.UninitializedParameter)},
    )


@pytest.mark.parametrize(("make", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_failing_conversion_names_the_layer_and_changes_nothing(make, reason):
    model = nn.ModuleDict(
        {"first": nn.Linear(64, 64), "block": nn.Sequential(nn.ReLU(), make()), "last": nn.Linear(64, 64)}
    )
    before = state(model)
    wanted = {"first", "block.1", "last"}
    with pytest.raises(
        ValueError, match=f"1 of 3 layers cannot be converted, and nothing was changed.*\n  block.1: .*{reason}"
    ):
        quantize_(model, FP8, lambda m, fqn: fqn in wanted)
    assert state(model) == before
    quantize_(model, FP8, skip_fqns("block.*"))
    assert type(model["first"].weight) is type(model["last"].weight) is MasterWeightTensor


def test_converting_while_a_graph_is_alive_changes_nothing():
    model = mlp(FP8)
    out, before = model(torch.randn(3, 64)), state(model)
    with pytest.raises(ValueError, match="2 of 2 layers cannot be converted"):
        quantize_(model, NVFP4)
    assert state(model) == before
    out.sum().backward()
    del out
    quantize_(model, NVFP4)


def test_the_message():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(ValueError) as error:
        quantize_(model, NVFP4)
    assert_expected_inline(
        str(error.value),
        """\
quantize_: 2 of 3 layers cannot be converted, and nothing was changed; fix them, or leave them out with filter_fn=skip_fqns(...):
  0: its weight is torch.float64; cast it to bfloat16, float16 or float32, or exclude the layer
  1: its weight is not initialized yet; run one forward pass first""",  # noqa: E501
    )


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@both_formats
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_copies_of_converted_models(config, copied, master_weights):
    model = Tied()
    quantize_(
        model,
        replace(config, master_weights=master_weights),
        is_linear() & skip_fqns("" if master_weights else "lm_head"),
    )
    other, ids = copied(model), torch.tensor([[1, 2, 3]])
    assert other.embed.weight is other.lm_head.weight and kinds(other) == kinds(model)
    assert_bitwise_equal(other(ids).detach(), model(ids).detach())
    other(ids).sum().backward()
    with torch.no_grad():
        other.embed.weight.mul_(2)
    assert not torch.equal(other(ids), model(ids)) and model.embed.weight.grad is None
    assert {k: type(v) for k, v in other.state_dict().items()} == {k: type(v) for k, v in model.state_dict().items()}


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
    with pytest.raises(
        ValueError, match=r"self_attn.out_proj: nn.MultiheadAttention uses its weight without calling it"
    ):
        quantize_(plain, FP8, is_linear())


def test_code_that_calls_f_linear_with_the_weight():
    """As models of Hugging Face do, positionally or by name."""
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    quantize_(layer, FP8)
    expected = linear_by_hand(x, layer.weight.hp, layer.bias, torch.zeros(3, 48), FP8)[0]
    for out in (F.linear(x, layer.weight, layer.bias), F.linear(input=x, weight=layer.weight, bias=layer.bias),
                linear(x, layer.weight, layer.bias), torch._C._nn.linear(x, layer.weight, layer.bias)):  # fmt: skip
        assert_bitwise_equal(out.detach(), expected)


def test_functional_call_takes_plain_weights():
    model, x = mlp(FP8), torch.randn(3, 64)
    plain = {name: p.detach().clone() for name, p in mlp(seed=3).named_parameters()}
    with pytest.warns(UserWarning, match="0 was converted to low precision, but its weight was replaced by a plain"):
        out = torch.func.functional_call(model, plain, (x,))
    assert_bitwise_equal(out, mlp(seed=3)(x).detach())


@both_formats
def test_converted_on_meta_then_materialised(config):
    with torch.device("meta"):
        model = mlp(config)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    model.load_state_dict(mlp(seed=2).state_dict())
    for a, b in zip(
        forward_backward(model, torch.ones(3, 64)), forward_backward(mlp(config, seed=2), torch.ones(3, 64))
    ):
        assert_bitwise_equal(a, b)


def test_a_quantised_tensor_is_not_tied_to_an_embedding():
    """An embedding cannot look rows up in it: refused before any change, and foretold by the dry run."""
    model, config = Tied(), replace(FP8, master_weights=False)
    reasons = [layer.reason for layer in dry_run(model, config).layers if layer.status == "cannot convert"]
    assert len(reasons) == 1 and "shared with another module, Embedding" in reasons[0]
    with pytest.raises(ValueError, match=r"lm_head: its weight is shared with another module, Embedding"):
        quantize_(model, config)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_class_that_cannot_be_derived_from_is_refused_before_any_change():
    class Registered(nn.Linear):
        def __init_subclass__(cls, *, name, **options):
            super().__init_subclass__(**options)

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(nn.Linear(32, 32), Registered(32, 32))
    with pytest.raises(ValueError, match=r"1: no class can be derived from Registered .*'name'"):
        quantize_(model, FP8)
    assert not any(isinstance(p, MasterWeightTensor) for p in model.parameters())


def test_a_forward_pass_of_one_instance_is_refused():
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: (x[:, None] * layer.weight).sum(-1)
    with pytest.raises(ValueError, match="its forward pass is an attribute of the instance"):
        quantize_(nn.Sequential(layer), FP8)
