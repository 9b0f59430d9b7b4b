"""Checkpoints in NVFP4 as NVIDIA's Model Optimizer has them: out, back, and others' code reads them."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import NVFP4, mlp, replace

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import digest, language_model, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")
FORMAT = layouts.MODELOPT.name
PARTS = ("weight", "weight_scale", "weight_scale_2")
FEATURES = (208, 304, 130)
masters_or_not = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))


def export(model, folder, format: str = FORMAT) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.export(model, folder, format)
    return tensors_in(folder)


def assert_same_files(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape and digest(got[name]) == digest(x), name


@masters_or_not
def test_files_have_the_bytes_that_products_read(masters, tmp_path):
    model = mlp(replace(NVFP4, master_weights=masters), features=FEATURES)
    weights = checkpoint.quantized_weights(model, FORMAT)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in weights}
    found = export(model, tmp_path / "out")
    assert found.keys() == {f"{i}.{n}" for i in (0, 2) for n in (*PARTS, "bias")}
    for i in (0, 2):
        operand = model[i].weight.quantized() if masters else model[i].weight.operand()
        assert digest(found[f"{i}.weight"]) == digest(operand.qdata)
        scale = found[f"{i}.weight_scale"].view(torch.uint8)
        assert_bitwise_equal(scale, operand.scale.view(torch.uint8).repeat_interleave(16, 0)[: len(scale)])
        # A number without a dim, as it decodes.
        assert_bitwise_equal(found[f"{i}.weight_scale_2"], operand.global_scale.reshape(()))


@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe", "DeepseekV3"))
def test_it_is_what_the_other_format_of_nvfp4_has(name, tmp_path):
    """Other names, and the tensor scale's reciprocal; layers that engines join have one here, too."""
    found = export(language_model(name, NVFP4), tmp_path / "out")
    other = export(language_model(name, NVFP4), tmp_path / "other", layouts.COMPRESSED_TENSORS.name)
    renamed = {
        n.removesuffix("_packed").replace("weight_global_scale", "weight_scale_2"): x.view(torch.uint8)
        for n, x in other.items()
        if not n.endswith("_global_scale")
    }
    for n, x in found.items():
        if n.endswith("_scale_2"):
            stored = other[n.replace("weight_scale_2", "weight_global_scale")]
            assert_bitwise_equal(x.reciprocal().reshape(1), stored)
        else:
            assert digest(x) == digest(renamed.pop(n)), n
    assert not renamed
    # The same by value, for what compares checkpoints.
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "other"), "--error", "1e-6"]) == 0


def test_settings_name_the_layers_that_are_left_out(tmp_path):
    export(language_model("Llama", NVFP4), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert settings["quant_method"] == "modelopt"
    assert settings["quant_algo"] == beside["quant_algo"] == "W4A16_NVFP4"
    assert settings["ignore"] == beside["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    assert beside["group_size"] == 16 and beside["kv_cache_quant_algo"] is None


@masters_or_not
@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe"))
def test_files_come_back_byte_for_byte(name, masters, tmp_path):
    config = replace(NVFP4, master_weights=masters)
    before = export(language_model(name, config), tmp_path / "out")
    other = language_model(name, config)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.ones(p.shape))
    checkpoint.load(other, tmp_path / "out")
    assert_same_files(export(other, tmp_path / "again"), before)


def test_scales_of_activations_are_read_past(tmp_path):
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out")
    found |= {"0.input_scale": torch.tensor(0.1), "2.weight_scale_2": found["2.weight_scale_2"].reshape(1)}
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors")
    settings = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(settings))
    model, plain = mlp(NVFP4, features=FEATURES, seed=1), mlp(features=FEATURES)
    for loaded in (model, plain):
        checkpoint.load(loaded, tmp_path / "out")
    assert torch.equal(model[0].weight.hp, plain[0].weight)


WRONG = {
    "no tensor scale": (lambda t: t.pop("2.weight_scale_2"), r"2\.weight in .* is in U8 and has no 2\.weight_scale_2"),
    "no scale": (lambda t: t.pop("0.weight_scale"), r"0\.weight in .* is in U8 and has no 0\.weight_scale;"),
    "zero": (lambda t: t["0.weight_scale_2"].zero_(), r"0\.weight_scale_2 in .* is 0\.0, no positive number"),
    "algorithm": (None, r"quant_algo is 'W4A8_AWQ'; of modelopt's files those of 'W4A16_NVFP4' or 'NVFP4' are read"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit_change_nothing(change, message, tmp_path):
    found = export(mlp(NVFP4, features=FEATURES, seed=1), tmp_path / "out")
    if change is None:
        settings = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
        (tmp_path / "out" / "config.json").write_text(json.dumps({"quantization_config": settings}))
    else:
        change(found)
        safetensors.save_file(found, tmp_path / "out" / "model.safetensors")
    model = mlp(NVFP4, features=FEATURES)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, tmp_path / "out")
    for n, x in model.state_dict().items():
        assert_bitwise_equal(x, before[n], n)


def test_convert_writes_what_export_writes(tmp_path):
    language_model("Llama", None).save_pretrained(tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", FORMAT]) == 0
    assert_same_files(tensors_in(tmp_path / "out"), export(language_model("Llama", NVFP4), tmp_path / "exported"))
    both = [(tmp_path / folder / "hf_quant_config.json").read_text() for folder in ("out", "exported")]
    assert both[0] == both[1]


def test_model_optimizer_decodes_it(tmp_path):
    """Its own class for such weights gives our values; its config is ours, but for the producer's version."""
    pytest.importorskip("modelopt")
    theirs = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    model = mlp(NVFP4, features=FEATURES)
    found = export(model, tmp_path / "out")
    for i in (0, 2):
        payload, scale, factor = (found[f"{i}.{part}"] for part in PARTS)
        shape = model[i].weight.shape
        held = theirs(shape, torch.float32, payload)
        values = held.dequantize(dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
        plain = mlp(features=FEATURES)
        checkpoint.load(plain, tmp_path / "out")
        # Factors are multiplied in another order.
        torch.testing.assert_close(values, plain[i].weight.detach(), rtol=3e-7, atol=0)
    convert = importlib.import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    plain = PlainLayers(["lm_head"], [])
    settings = layouts.MODELOPT.settings(plain)
    assert convert(layouts.hf_quant_config(settings)).items() <= settings.items()
