"""Checkpoints in NVFP4 come back: payload as it is, or values that quantize to it again."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import FP8, NVFP4, mlp, replace

from torchao_blockwise import MasterWeightTensor, NVFP4Tensor, checkpoint, ops
from torchao_blockwise.checkpoint.layouts import COMPRESSED_TENSORS
from torchao_blockwise.checkpoint.stored_weights import decode_factor
from torchao_blockwise.cli import main
from torchao_blockwise.formats import E2M1, NVFP4_16X16, global_scale_of
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import digest, language_model, logits, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")
FORMAT = COMPRESSED_TENSORS.name
QUANTIZED = replace(NVFP4, master_weights=False)
FEATURES = (208, 304, 130)
masters_or_not = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))


def export(model, folder) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.export(model, folder, FORMAT)
    return tensors_in(folder)


def ones(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.ones(p.shape))
    return model


def assert_same_files(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert digest(got[name]) == digest(x), name


@masters_or_not
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize("seed", range(4))
def test_files_come_back_byte_for_byte(masters, dtype, seed, tmp_path):
    """Layers that no engine joins: the same forward pass, too."""
    config = replace(NVFP4, master_weights=masters)
    model = mlp(config, features=FEATURES, dtype=dtype, seed=seed)
    before = export(model, tmp_path / "out")
    other = ones(mlp(config, features=FEATURES, dtype=dtype, seed=9))
    checkpoint.load(other, tmp_path / "out")
    assert_same_files(export(other, tmp_path / "again"), before)
    x = torch.randn(4, FEATURES[0], dtype=dtype)
    assert_bitwise_equal(other(x).detach(), model(x).detach())


@masters_or_not
@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe", "DeepseekV3"))
def test_models_with_joined_layers_come_back(name, masters, tmp_path):
    """q, k and v, gate and up, and experts, which have the tensor scale of the largest in the files."""
    config = replace(NVFP4, master_weights=masters)
    model = language_model(name, config)
    before = export(model, tmp_path / "out")
    other = ones(language_model(name, config))
    assert not torch.equal(logits(other), logits(model))
    checkpoint.load(other, tmp_path / "out")
    assert_same_files(export(other, tmp_path / "again"), before)


@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe"))
def test_unconverted_and_converted_models_get_the_values(name, tmp_path):
    """Those that the files stand for, exactly; quantized Parameters the payload itself."""
    found = export(language_model(name, NVFP4), tmp_path / "out")
    plain, masters, quantized = (ones(language_model(name, c)) for c in (None, NVFP4, QUANTIZED))
    for model in (plain, masters, quantized):
        checkpoint.load(model, tmp_path / "out")
    checked = 0
    for n, p in plain.named_parameters():
        other, payload = masters.get_parameter(n), quantized.get_parameter(n)
        if not isinstance(other, MasterWeightTensor):
            assert_bitwise_equal(other.detach(), p.detach(), n)
            continue
        assert_bitwise_equal(payload.dequantize().detach(), p.detach(), n)
        assert torch.equal(other.hp, p), n
        if f"{n}_packed" in found:
            assert digest(payload.qdata) == digest(found[f"{n}_packed"])
            stored = found[f"{n}_scale"].view(torch.uint8)
            assert_bitwise_equal(payload.scale.view(torch.uint8), stored[::16].contiguous())
            assert_bitwise_equal(payload.global_scale.reciprocal().reshape(1), found[f"{n}_global_scale"])
            decoded = E2M1.decode(found[f"{n}_packed"], p.shape[-1]) * found[f"{n}_scale"].float().repeat_interleave(
                16, -1
            )
            torch.testing.assert_close(p.detach(), decoded / found[f"{n}_global_scale"], rtol=3e-7, atol=0)
            checked += 1
    assert checked


def test_every_factor_comes_back():
    """The number whose reciprocal was stored: written again it is the same, and an amax leads to it."""
    amax = torch.cat((torch.logspace(-30, 30, 20_000), torch.rand(20_000) + 1, torch.tensor([0.0, 1e-34, 1e37])))
    for x in amax:
        stored = global_scale_of(x).reciprocal()
        factor = decode_factor(stored.reshape(1))
        assert torch.equal(factor.reciprocal(), stored), x
        assert torch.equal(global_scale_of(factor * 2688), factor), x
    # What no such number has as its reciprocal is inverted, and no more.
    for stored in torch.rand(2000) + 1:
        torch.testing.assert_close(decode_factor(stored) * stored, torch.ones(()), rtol=2e-7, atol=0)


def test_blocks_whose_scale_underflows_come_back_as_zeros(tmp_path):
    """The one case where other bytes with the same values are written: codes that a scale of zero makes nothing of."""
    model = mlp(NVFP4, features=FEATURES)
    with torch.no_grad():
        model[0].weight.hp[:16, :16] *= 1e-7
    before = export(model, tmp_path / "out")
    assert before["0.weight_packed"][:16, :8].any() and not before["0.weight_scale"][:16, 0].float().any()
    checkpoint.load(model, tmp_path / "out")
    after = export(model, tmp_path / "again")
    assert not (after["0.weight_packed"][:16, :8] & 0x77).any()
    for found in (before, after):
        found["0.weight_packed"][:16, :8] = 0
    assert_same_files(after, before)


def test_blocks_of_rows_are_decoded(tmp_path):
    """Files of others, with another scale in each row and a factor for activations, into every kind of model."""
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out")
    w = torch.randn(FEATURES[1], FEATURES[0])
    made = NVFP4Tensor.from_hp(w, block_size=(1, 16))
    found["0.weight_packed"], found["0.weight_scale"] = made.qdata, made.scale
    found["0.weight_global_scale"] = made.global_scale.reciprocal().reshape(1)
    found["0.input_global_scale"] = torch.ones(1)
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors")
    for config in (None, NVFP4, QUANTIZED, FP8):
        model = mlp(config, features=FEATURES, seed=1)
        checkpoint.load(model, tmp_path / "out")
        values = made.dequantize()
        weight = model[0].weight
        if config is QUANTIZED:
            again = ops.quantize(values, NVFP4_16X16).rowwise
            assert digest(weight.qdata) == digest(again.qdata)
        else:
            assert_bitwise_equal((weight if config is None else weight.hp).detach(), values)


def test_parameters_of_several_tensor_scales_are_quantized_anew(tmp_path):
    """Experts lie in one Parameter, which has one tensor scale."""
    before = export(language_model("Qwen3Moe", QUANTIZED), tmp_path / "out")
    name = "model.layers.0.mlp.experts.1.down_proj.weight_global_scale"
    before[name] *= 4
    safetensors.save_file(before, tmp_path / "out" / "model.safetensors")
    plain, model = language_model("Qwen3Moe", None), language_model("Qwen3Moe", QUANTIZED)
    for loaded in (plain, model):
        checkpoint.load(loaded, tmp_path / "out")
    values = plain.model.layers[0].mlp.experts.down_proj.detach()
    got = model.model.layers[0].mlp.experts.down_proj
    assert_bitwise_equal(got.dequantize().detach(), NVFP4Tensor.from_hp(values).dequantize())


def test_verify_decodes_it(tmp_path, capsys):
    model = language_model("Llama", None)
    model.save_pretrained(tmp_path / "plain")
    export(language_model("Llama", NVFP4), tmp_path / "out")
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "plain")]) == 0
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "plain"), "--error", "0.05"]) == 1
    found = tensors_in(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    found[f"{name}_packed"] ^= 0x33
    (tmp_path / "other").mkdir()
    safetensors.save_file(found, tmp_path / "other" / "model.safetensors")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "other")]) == 1
    assert f"{name}: relative error" in capsys.readouterr().out


def _set(name: str, value: float):
    return lambda t: t[name].view(-1)[:1].copy_(torch.tensor(value))


WRONG = {
    "no scale": (
        lambda t: t.pop("0.weight_scale"),
        ValueError,
        r"0\.weight_packed in .*model\.safetensors is in U8 and has no 0\.weight_scale; copy the files again",
    ),
    "no tensor scale": (lambda t: t.pop("2.weight_global_scale"), ValueError, r"has no 2\.weight_global_scale"),
    "no payload": (lambda t: t.pop("0.weight_packed"), KeyError, r"has no 0\.weight"),
    "zero": (_set("2.weight_global_scale", 0), ValueError, r"2\.weight_global_scale in .* is 0\.0, no positive number"),
    "NaN": (
        _set("2.weight_global_scale", float("nan")),
        ValueError,
        r"is nan, no positive number; copy the file again",
    ),
    "Inf": (_set("2.weight_global_scale", float("inf")), ValueError, r"is inf, no positive number"),
    "negative": (
        _set("0.weight_scale", -1),
        ValueError,
        r"0\.weight_scale in .* has scales that are no positive numbers",
    ),
    "NaN block": (
        _set("0.weight_scale", float("nan")),
        ValueError,
        r"scales that are no positive numbers; copy the file",
    ),
    "rows": (
        lambda t: t.update({"2.weight_scale": t["2.weight_scale"][1:].clone()}),
        ValueError,
        r"2\.weight_scale in .* has shape \[129, 19\], the model wants \[130, 19\]",
    ),
    "columns": (
        lambda t: t.update({"0.weight_packed": t["0.weight_packed"][:, :96].clone()}),
        ValueError,
        r"0\.weight_packed in .* has shape \[304, 96\], the model wants \[304, 104\]",
    ),
    "factors": (
        lambda t: t.update({"0.weight_global_scale": torch.ones(3)}),
        ValueError,
        r"0\.weight_global_scale in .* has shape \[3\], the model wants \[1\]",
    ),
    "dtype": (
        lambda t: t.update({"0.weight_scale": t["0.weight_scale"].float()}),
        ValueError,
        r"0\.weight_scale in .* is in F32; F8_E4M3 is read there",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit_change_nothing(change, error, message, tmp_path):
    found = export(mlp(NVFP4, features=FEATURES, seed=1), tmp_path / "out")
    change(found)
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors")
    for config in (NVFP4, QUANTIZED, None):
        model = mlp(config, features=FEATURES)
        before = {n: x.clone() for n, x in model.state_dict().items()}
        with pytest.raises(error, match=message):
            checkpoint.load(model, tmp_path / "out")
        for n, x in model.state_dict().items():
            assert_bitwise_equal(x, before[n], n)


def test_other_files_of_compressed_tensors_are_named(tmp_path):
    export(mlp(NVFP4, features=FEATURES), tmp_path / "out")
    settings = '{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}'
    (tmp_path / "out" / "config.json").write_text(settings)
    with pytest.raises(ValueError, match=r"format is 'pack-quantized'; .* those of 'nvfp4-pack-quantized' are read"):
        checkpoint.load(mlp(NVFP4, features=FEATURES), tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*copy it again"):
        checkpoint.load(mlp(NVFP4, features=FEATURES), tmp_path / "out")
