"""State dicts of quantized Parameters: plain values that quantize to the same again."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8, RECIPES, Tied, mlp, replace, saved_and_loaded
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8Tensor, NVFP4Tensor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors.state_values import plain_values
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")

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


@pytest.mark.parametrize("config", (FP8, *QUANTIZED.values()), ids=("fp8_masters", *QUANTIZED))
def test_safetensors(config, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, plain = mlp(config), mlp(seed=3)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    safetensors.save_file(model.state_dict(), tmp_path / "file.safetensors")
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    for name in ("file", "model"):
        loaded = safetensors.load_file(tmp_path / f"{name}.safetensors")
        assert loaded.keys() == expected.keys()
        for key, x in loaded.items():
            assert_bitwise_equal(x, expected[key], key)
    safetensors.load_model(plain, str(tmp_path / "model.safetensors"))
    assert_bitwise_equal(plain[0].weight.detach(), expected["0.weight"])


@fp8_and_nvfp4
@pytest.mark.parametrize("owned", (False, True), ids=("alone", "optimizer"))
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
