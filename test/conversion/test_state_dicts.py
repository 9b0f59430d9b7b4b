"""State dicts: plain high-precision tensors under the original names, in both directions, and values that they hold."""

import pytest
import torch
from expert_modules import Model
from helpers import (
    FP8,
    NVFP4,
    RECIPES,
    Tied,
    assert_same_tensors,
    both_formats,
    both_masters,
    mlp,
    replace,
    saved_and_loaded,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    experts,
    is_linear,
    load_recipe_state,
    recipe_state,
)
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors.state_values import plain_values
from torchao_blockwise.testing import assert_bitwise_equal


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.tied, self.blocks = Tied(), nn.ModuleList([mlp(features=(64, 32, 64)), nn.BatchNorm1d(64)])
        self.experts = Model(blocks=1)


def models(config):
    """(converted, plain) with different values and the same structure."""
    torch.manual_seed(0)
    converted, plain = Nested(), Nested()
    quantize_(converted, config, is_linear() | experts())
    return converted, plain


@both_formats
def test_names_and_types_are_those_of_the_plain_model(config):
    converted, plain = models(config)
    saved = converted.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert all(type(v) is torch.Tensor and not v.requires_grad for v in saved.values())
    assert saved["tied.embed.weight"].data_ptr() == saved["tied.lm_head.weight"].data_ptr()
    assert saved["tied.embed.weight"].data_ptr() == converted.tied.embed.weight.hp.data_ptr()


@both_formats
@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
@pytest.mark.parametrize("through_file", (False, True), ids=("memory", "file"))
@pytest.mark.parametrize("direction", ("to_plain", "to_converted", "between_converted"))
def test_both_directions(config, assign, through_file, direction):
    converted, plain = models(config)
    target, source = (plain, converted) if direction == "to_plain" else (converted, plain)
    if direction == "between_converted":
        quantize_(source, NVFP4, is_linear() | experts())
    saved = source.state_dict()
    saved = saved_and_loaded(saved) if through_file else {k: v.clone() for k, v in saved.items()}
    result = target.load_state_dict(saved, assign=assign, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_tensors(target.state_dict(), source.state_dict())
    for weight in (target.blocks[0][0].weight, target.experts.layers[0].experts.up):
        assert type(weight) is (nn.Parameter if direction == "to_plain" else MasterWeightTensor)
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert assign or target.tied.embed.weight is target.tied.lm_head.weight


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@both_formats
@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
@pytest.mark.parametrize(
    "parametrize", (weight_norm, lambda layer: register_parametrization(layer, "weight", Double()))
)
def test_parametrized_weights(config, parametrize, assign):
    """A state dict has the values that the parametrization reads, as that of a plain model."""
    converted, plain, x = mlp(config), mlp(seed=1), torch.randn(4, 64)
    for model in (converted, plain):
        parametrize(model[0])
    expected = saved_and_loaded(plain.state_dict())
    converted.load_state_dict(expected, assign=assign)
    saved = converted.state_dict()
    assert all(type(v) is torch.Tensor for v in saved.values())
    assert_same_tensors(saved, expected)
    assert isinstance(converted[0].weight, MasterWeightTensor) and converted(x).isfinite().all()


@both_formats
@both_masters
def test_models_on_meta_have_the_state_dict_of_a_plain_one(config, masters):
    """Also after it was loaded; a checkpoint fills them."""

    def build(config):
        model = nn.ModuleList([mlp(), Model(blocks=1)])
        quantize_(model, config, is_linear() | experts())
        return model

    config, plain = replace(config, master_weights=masters), nn.ModuleList([mlp(seed=1), Model(blocks=1)])
    filled = build(config).to("meta")
    for _ in range(2):
        saved = filled.state_dict()
        described = [[(k, x.shape, x.dtype) for k, x in state.items()] for state in (saved, plain.state_dict())]
        assert described[0] == described[1] and all(type(x) is torch.Tensor and x.is_meta for x in saved.values())
        filled.load_state_dict(saved)
    filled.to_empty(device="cpu").load_state_dict(plain.state_dict())
    expected = build(config)
    expected.load_state_dict(plain.state_dict())
    assert_same_tensors(filled.state_dict(), expected.state_dict())


@pytest.mark.parametrize("start", ("cpu", "meta"))
@both_masters
def test_assigned_weights_keep_their_names_and_random_bits(masters, start):
    config = replace(NVFP4, master_weights=masters, seed=7)
    source, x = mlp(config, seed=3), torch.ones(32, 64)
    source(x).sum().backward()
    with torch.device(start):
        model = mlp(config)
    model[2].weight.requires_grad_(False)
    model.load_state_dict(source.state_dict(), assign=True)
    assert recipe_state(model) == recipe_state(mlp(config))
    assert model[0].weight.config == config and not model[2].weight.requires_grad
    assert [model[i].weight.layer for i in (0, 2)] == ["0.weight", "2.weight"]
    load_recipe_state(model, recipe_state(source))
    assert_same_tensors(*[dict(enumerate(torch.autograd.grad(m(x).sum(), m[0].bias))) for m in (model, source)])


def test_strict_reports_what_a_plain_model_reports():
    converted, plain = models(FP8)
    state = plain.state_dict()
    state["extra"] = state.pop("blocks.0.0.weight")
    for target in models(FP8):
        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"blocks.0.0.weight".*Unexpected key.*"extra"'):
            target.load_state_dict(state)
        assert target.load_state_dict(state, strict=False).missing_keys == ["blocks.0.0.weight"]
    state = {"blocks.0.0.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.0.weight"):
        converted.load_state_dict(state, strict=False)


def test_keep_vars_gives_the_parameters():
    model = mlp(FP8)
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is model[0].weight and kept["0.bias"] is model[0].bias


@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
def test_quantized_parameters_load_plain_values(assign):
    model, plain = mlp(replace(FP8, master_weights=False)), mlp(seed=3)
    model.load_state_dict(plain.state_dict(), assign=assign)
    weight = model[0].weight
    assert type(weight) is BlockwiseFP8Tensor and isinstance(weight, nn.Parameter) and not weight.config.master_weights
    assert torch.equal(weight, BlockwiseFP8Tensor.from_hp(plain[0].weight))
    model.load_state_dict(saved_and_loaded(model.state_dict()), assign=assign)
    assert torch.equal(model[0].weight, weight)


@both_formats
@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
def test_checkpoints_that_hold_quantized_tensors_load(config, assign):
    """As they were written before state dicts of quantized Parameters were plain."""
    config = replace(config, master_weights=False)
    model, source = mlp(config), mlp(config, seed=3)
    state = saved_and_loaded({name: p.detach() for name, p in source.named_parameters()})
    model.load_state_dict(state, assign=assign)
    assert type(model[0].weight) is type(source[0].weight) and torch.equal(model[0].weight, source[0].weight)
    assert torch.equal(model(torch.ones(2, 64)), source(torch.ones(2, 64)))


# --- values of quantized Parameters, which quantize to the same again -------------------------------------------------

QUANTIZED = {name: replace(config, master_weights=False) for name, config in RECIPES.items()}
every_recipe = pytest.mark.parametrize("config", QUANTIZED.values(), ids=QUANTIZED)
fp8_and_nvfp4 = pytest.mark.parametrize("config", (QUANTIZED["fp8"], QUANTIZED["nvfp4"]), ids=("fp8", "nvfp4"))


def batch() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


@every_recipe
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_values_quantize_to_the_same(config, dtype):
    """In a fresh model that loads them, and in a plain one that loads them and is converted."""
    for seed in range(3):
        model = mlp(config, features=(64, 200, 64), dtype=dtype, seed=seed)
        state = saved_and_loaded(model.state_dict())
        assert all(type(v) is torch.Tensor and v.dtype == dtype and not v.requires_grad for v in state.values())
        loaded, converted = mlp(config, features=(64, 200, 64), dtype=dtype, seed=99), mlp(None, (64, 200, 64))
        converted.to(dtype).load_state_dict(state)
        quantize_(converted, config)
        loaded.load_state_dict(state)
        for other in (loaded, converted):
            assert_bitwise_equal(other[0].weight.dequantize(), model[0].weight.dequantize())
            # Powers of two may come back as half the scale and twice the payload.
            assert config.power_of_2_scales or torch.equal(other[0].weight, model[0].weight)
            assert_bitwise_equal(other(batch().to(dtype)).detach(), model(batch().to(dtype)).detach())
        off = (state["0.weight"].float() - model[0].weight.dequantize(torch.float32)).abs()
        assert off.max() <= torch.finfo(dtype).eps * state["0.weight"].abs().max()


@fp8_and_nvfp4
def test_tied_weights_stay_tied(config):
    plain, model = Tied(), Tied()
    quantize_(model, config, filter_fn=lambda m, fqn: fqn.startswith("blocks."))
    model.blocks[1].weight = model.blocks[0].weight
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state["blocks.0.weight"].data_ptr() == state["blocks.1.weight"].data_ptr()
    assert model.state_dict()["blocks.1.weight"].data_ptr() != state["blocks.1.weight"].data_ptr(), "an earlier one's"


@pytest.mark.parametrize("values", (0.0, float("nan"), float("inf")), ids=str)
@fp8_and_nvfp4
def test_blocks_of_zeros_nan_and_inf(config, values):
    model = mlp()
    with torch.no_grad():
        model[0].weight[:16, :16] = values
    quantize_(model, config)
    assert_bitwise_equal(model.state_dict()["0.weight"], model[0].weight.dequantize())


@pytest.mark.parametrize("scale", (0.0, 2**-9, 3.0, 448.0), ids=str)
@pytest.mark.parametrize("sign", (0, 0x88), ids=("zeros", "minus_zeros"))
@pytest.mark.parametrize(("cls", "mask"), ((BlockwiseFP8Tensor, 0xBF), (NVFP4Tensor, 0xEE)), ids=("fp8", "nvfp4"))
def test_blocks_of_zeros_with_scales_of_other_tools(cls, mask, sign, scale):
    """They stay zeros where the largest values of others, which lack the largest code, are moved by a step."""
    weight = cls.from_hp(torch.randn(160, 200, generator=torch.Generator().manual_seed(0)))
    rows, columns = weight.fmt.block
    codes = weight.qdata.view(torch.uint8)
    codes[rows:] &= mask
    # Two codes a byte in NVFP4.
    codes[:rows, : columns // weight.fmt.element.per_byte] = sign if cls is NVFP4Tensor else sign & 0x80
    weight.scale[0, 0] = scale
    decoded, values = weight.dequantize(), plain_values(weight)
    assert not torch.equal(values, decoded) and values.isfinite().all()
    assert_bitwise_equal(values[:rows, :columns], decoded[:rows, :columns])


def test_values_in_bf16_stay_where_no_step_gives_their_scales():
    """A step of bf16 is larger than the error that it would correct."""
    weight = BlockwiseFP8Tensor.from_hp(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
    weight = weight.to(torch.bfloat16)
    assert not torch.equal(BlockwiseFP8Tensor.from_hp(weight.dequantize()).scale, weight.scale)
    assert_bitwise_equal(plain_values(weight), weight.dequantize())


@pytest.mark.parametrize("config", (FP8, *QUANTIZED.values()), ids=("fp8_masters", *QUANTIZED))
def test_safetensors(config, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, plain = mlp(config), mlp(seed=3)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    safetensors.save_file(model.state_dict(), tmp_path / "file.safetensors")
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    for name in ("file", "model"):
        assert_same_tensors(safetensors.load_file(tmp_path / f"{name}.safetensors"), expected)
    safetensors.load_model(plain, str(tmp_path / "model.safetensors"))
    assert_bitwise_equal(plain[0].weight.detach(), expected["0.weight"])


@fp8_and_nvfp4
@pytest.mark.parametrize("owned", (False, True), ids=("no_optimizer", "optimizer"))
def test_a_state_dict_changes_nothing(config, owned):
    """Neither the payload between forward and backward, nor masters, nor what compilers guard on."""
    torch._dynamo.reset()
    model = mlp(config)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model, lr=0.0) if owned else None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        out, version = compiled(batch()), model[0].weight.qdata._version
        state = model.state_dict()
        assert model[0].weight.qdata._version == version
        out.sum().backward()
        if optimizer is not None:
            before = optimizer.master(model[0].weight).clone()
            model.load_state_dict(state)
            assert_bitwise_equal(optimizer.master(model[0].weight), before)
            optimizer.step()
    assert counter.frame_count == 1
