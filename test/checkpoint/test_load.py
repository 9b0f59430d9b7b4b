"""`load` takes payloads as they are, or gives values that quantize to them again; from plain files their values."""

import json

import pytest
import torch
from exported_models import (
    FORMATS,
    MODELS,
    alike_layers,
    decoded,
    digest,
    export,
    filled,
    language_model,
    logits,
    save,
    tensors_in,
    tiny_mixture,
    values_of,
)
from helpers import FP8, FP8_POW2, NVFP4, assert_same_tensors, both_masters, mlp, replace
from live_memory import peak_of
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, NVFP4Tensor, checkpoint, ops, recommended_layers
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.stored_weights import decode_factor
from torchao_blockwise.cli import main
from torchao_blockwise.formats import NVFP4_16X16, global_scale_of
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

FEATURES = (208, 304, 130)
QUANTIZED = replace(NVFP4, master_weights=False)


def model_of(name: str, config):
    if name != "deepseek_v4":
        return language_model(name, config)
    model = tiny_mixture(name, "cpu")
    return model if config is None else quantize_(model, config, filter_fn=recommended_layers(model)) or model


CASES = [(name, "fp8_block") for name in MODELS] + [("deepseek_v4", "fp8_block_ue8m0")]
CASES += [(name, "nvfp4_compressed_tensors") for name in ("Llama", "Qwen3Moe", "DeepseekV3")]
CASES += [("Qwen3Moe", "nvfp4_modelopt")]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_every_model_gets_the_values_of_files(name, format, tmp_path):
    """Files of masters and of quantized Parameters come back byte for byte, also into models of the other kind.

    Plain models and masters get what the files stand for, quantized Parameters the payload itself.
    """
    kinds = {masters: replace(FORMATS[format], master_weights=masters) for masters in (True, False)}
    for masters, config in kinds.items():
        model = model_of(name, config)
        found = export(model, tmp_path / f"{masters}", format)
        plain = filled(model_of(name, None))
        checkpoint.load(plain, tmp_path / f"{masters}")
        for loaded_masters, other_config in kinds.items():
            other = filled(model_of(name, other_config))
            checkpoint.load(other, tmp_path / f"{masters}")
            for n, p in other.named_parameters():
                # Masters in FP8 may be moved by one unit in the last place, such that they lead to the scale.
                rtol = 2**-22 if format.startswith("fp8") and isinstance(p, MasterWeightTensor) else 0
                torch.testing.assert_close(values_of(p), plain.get_parameter(n).detach(), rtol=rtol, atol=0)
            again = export(other, tmp_path / f"{masters}{loaded_masters}", format)
            assert_same_tensors(again, found)
        if format == "fp8_block" and name != "deepseek_v4":
            assert_bitwise_equal(logits(other), logits(model_of(name, config)))
        scale = "scale" if format == "fp8_block_ue8m0" else None
        held = [n for n, _ in plain.named_parameters() if {n, f"{n}_packed"} & found.keys()]
        for n in held:
            weight = other.get_parameter(n)
            if isinstance(weight, QuantizedTensor):
                wanted = decoded(found, n, scale and f"{n.removesuffix('weight')}scale")
                torch.testing.assert_close(plain.get_parameter(n).detach(), wanted, rtol=3e-7, atol=0)
                assert digest(weight.qdata) == digest(found[n if n in found else f"{n}_packed"])
        assert held


@pytest.mark.parametrize("method", ("blockwise_fp8", "blockwise_nvfp4"))
def test_our_own_plain_checkpoints_are_read(method, tmp_path):
    """Of `integrations.transformers`, whose config.json has the recipe."""
    transformers = pytest.importorskip("transformers", "5.0")
    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config

    language_model("Llama", None).save_pretrained(tmp_path / "plain")
    config = {"blockwise_fp8": BlockwiseFP8Config, "blockwise_nvfp4": NVFP4Config}[method]()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == method
    other = language_model("Llama", None, initializer_range=0.5)
    checkpoint.load(other, tmp_path / "ours")
    assert_bitwise_equal(logits(other), logits(language_model("Llama", None)))
    assert main(["verify", str(tmp_path / "ours"), str(tmp_path / "plain")]) == 0
    for source in ("ours", "plain"):
        assert main(["convert", str(tmp_path / source), str(tmp_path / f"{source}-fp8")]) == 0
    assert_same_tensors(*(tensors_in(tmp_path / f"{source}-fp8") for source in ("ours", "plain")))


def test_what_transformers_passes_over_is_passed_over(tmp_path):
    """DeepSeek's and GLM's files hold a layer that predicts further tokens, which their models have not."""
    model = language_model("DeepseekV3")
    tensors = export(model, tmp_path / "out")
    further = {n.replace("layers.1.", "layers.61."): x.clone() for n, x in tensors.items() if "layers.1.mlp.sh" in n}
    assert any(name.endswith("weight_scale_inv") for name in further)
    more = {"self_attn.kv_b_proj.k_scale": torch.ones(()), "self_attn.rotary_emb.inv_freq": torch.ones(4)}
    more = {f"model.layers.0.{n}": x for n, x in more.items()} | {"model.layers.61.eh_proj.weight": torch.ones(4)}
    save(tensors | further | more, tmp_path / "out")
    other = filled(language_model("DeepseekV3"))
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    save(tensors | {"model.layers.7.norm.weight": torch.ones(4)}, tmp_path / "out")
    with pytest.raises(KeyError, match=r"no place for model\.layers\.7\.norm\.weight"):
        checkpoint.load(other, tmp_path / "out")


def test_experts_whose_rows_are_permuted_in_files_are_refused(tmp_path):
    """The files have the same shape, with rows of gate and up in turn."""
    model = tiny_mixture("inkling2_text", "cpu")
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=r"rearranges .*experts\.gate_up_proj .* save_pretrained and"):
        checkpoint.load(filled(model), tmp_path)


def test_a_norm_called_scale_is_no_scale(tmp_path):
    """`scale` next to a weight in high precision is another tensor."""
    model = mlp(FP8_POW2)
    for name in ("scale", "weight"):
        model.register_parameter(name, nn.Parameter(torch.ones(3)))
    export(model, tmp_path / "out", "fp8_block_ue8m0")
    checkpoint.load(filled(model, 0.0), tmp_path / "out")
    assert torch.equal(model.scale, torch.ones(3))


def test_every_factor_comes_back():
    """The number whose reciprocal was stored: written again it is the same, and an amax leads to it."""
    amax = torch.cat((torch.logspace(-30, 30, 5_000), torch.rand(5_000) + 1, torch.tensor([0.0, 1e-34, 1e37])))
    for x in amax:
        stored = global_scale_of(x).reciprocal()
        factor = decode_factor(stored.reshape(1))
        assert torch.equal(factor.reciprocal(), stored), x
        assert torch.equal(global_scale_of(factor * 2688), factor), x
    # What no such number has as its reciprocal is inverted, and no more.
    for stored in torch.rand(500) + 1:
        torch.testing.assert_close(decode_factor(stored) * stored, torch.ones(()), rtol=2e-7, atol=0)


def test_blocks_whose_scale_underflows_come_back_as_zeros(tmp_path):
    """The one case where other bytes with the same values are written: codes that a scale of zero makes nothing of."""
    model = mlp(NVFP4, features=FEATURES)
    with torch.no_grad():
        model[0].weight.hp[:16, :16] *= 1e-7
    before = export(model, tmp_path / "out", "nvfp4_compressed_tensors")
    assert before["0.weight_packed"][:16, :8].any() and not before["0.weight_scale"][:16, 0].float().any()
    checkpoint.load(model, tmp_path / "out")
    after = export(model, tmp_path / "again", "nvfp4_compressed_tensors")
    assert not (after["0.weight_packed"][:16, :8] & 0x77).any()
    for found in (before, after):
        found["0.weight_packed"][:16, :8] = 0
    assert_same_tensors(after, before)


def test_blocks_of_rows_are_decoded(tmp_path):
    """Files of others, with another scale in each row and a factor for activations, into every kind of model."""
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out", "nvfp4_compressed_tensors")
    made = NVFP4Tensor.from_hp(torch.randn(FEATURES[1], FEATURES[0]), block_size=(1, 16))
    found |= {"0.weight_packed": made.qdata, "0.weight_scale": made.scale, "0.input_global_scale": torch.ones(1)}
    save(found | {"0.weight_global_scale": made.global_scale.reciprocal().reshape(1)}, tmp_path / "out")
    for config in (None, NVFP4, QUANTIZED, FP8):
        model = mlp(config, features=FEATURES, seed=1)
        checkpoint.load(model, tmp_path / "out")
        if config is QUANTIZED:
            again = ops.quantize(made.dequantize(), NVFP4_16X16).rowwise
            assert digest(model[0].weight.qdata) == digest(again.qdata)
        else:
            assert_bitwise_equal(values_of(model[0].weight), made.dequantize())


def test_parameters_of_several_tensor_scales_are_quantized_again(tmp_path):
    """Experts lie in one Parameter, which has one tensor scale."""
    found = export(language_model("Qwen3Moe", QUANTIZED), tmp_path / "out", "nvfp4_compressed_tensors")
    found["model.layers.0.mlp.experts.1.down_proj.weight_global_scale"] *= 4
    save(found, tmp_path / "out")
    plain, model = language_model("Qwen3Moe", None), language_model("Qwen3Moe", QUANTIZED)
    for loaded in (plain, model):
        checkpoint.load(loaded, tmp_path / "out")
    values, got = (x.model.layers[0].mlp.experts.down_proj.detach() for x in (plain, model))
    assert_bitwise_equal(got.dequantize(), NVFP4Tensor.from_hp(values).dequantize())


def test_scales_of_activations_are_read_past(tmp_path):
    """Of Model Optimizer's NVFP4, which also has a tensor scale with a dim."""
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out", "nvfp4_modelopt")
    found |= {"0.input_scale": torch.tensor(0.1), "2.weight_scale_2": found["2.weight_scale_2"].reshape(1)}
    save(found, tmp_path / "out")
    settings = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(settings))
    model, plain = mlp(NVFP4, features=FEATURES, seed=1), mlp(features=FEATURES)
    for loaded in (model, plain):
        checkpoint.load(loaded, tmp_path / "out")
    assert torch.equal(model[0].weight.hp, plain[0].weight)


WIDE = (384, 640, 256)


def with_halves(config, dtype=torch.float32):
    """A model whose blocks' largest values lie around halves and wholes of the largest code, in all magnitudes."""
    model = mlp(replace(config, master_weights=True), WIDE, seed=1, dtype=dtype)
    peaks = [224 + 8 * i / 6 for i in range(7)] + [448, 464, 231.99, 224.001]
    n = 0
    for i in (0, 2):
        weight = model[i].weight.hp.data
        for row in range(0, weight.shape[0], 128):
            for column in range(0, weight.shape[1], 128):
                block = weight[row : row + 128, column : column + 128]
                block *= peaks[n % len(peaks)] * 2.0 ** (n % 40 - 25) / block.abs().amax()
                n += 1
        weight[:128, :128] = 0
    return model


@pytest.mark.parametrize("loaded", ("fp32", "bf16", "quantized"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("of_fp32", "of_bf16"))
@pytest.mark.parametrize("config", (FP8, FP8_POW2), ids=("fp32_scales", "powers_of_2"))
def test_load_and_export_repeat_every_byte(config, dtype, loaded, tmp_path, recwarn):
    if (config, loaded) == (FP8, "bf16") and dtype == torch.float32:
        pytest.skip("scales in fp32 of values in fp32 are not made of values in bf16")
    checkpoint.export(with_halves(config, dtype), tmp_path / "out")
    model = mlp(replace(config, master_weights=loaded != "quantized"), WIDE, dtype=dtype)
    if loaded == "bf16":
        model = mlp(config, WIDE, dtype=torch.bfloat16)
    checkpoint.load(model, tmp_path / "out")
    checkpoint.export(model, tmp_path / "again")
    before, after = (
        {n: x for n, x in tensors_in(tmp_path / folder).items() if not n.endswith("bias")}
        for folder in ("out", "again")
    )
    assert_same_tensors(after, before)
    assert not [w for w in recwarn if "power_of_2_scales" in str(w.message)]


@both_masters
@pytest.mark.parametrize(("of_files", "of_model"), ((FP8_POW2, FP8), (FP8, FP8_POW2)), ids=("to_fp32", "to_powers"))
@pytest.mark.parametrize("has_config", (True, False), ids=("config", "no_config"))
def test_other_scales_than_the_models_are_named(of_files, of_model, masters, has_config, tmp_path):
    """Whether or not config.json says `scale_fmt`."""
    before = export(with_halves(of_files), tmp_path / "out")
    if has_config:
        settings = layouts.FP8.quantization_config([], []) | (layouts.SCALE_FMT if of_files is FP8_POW2 else {})
        (tmp_path / "out" / "config.json").write_text(json.dumps({"quantization_config": settings}))
    model = mlp(replace(of_model, master_weights=masters), WIDE)
    if not masters and of_files is FP8_POW2:
        # The bytes are taken over.
        checkpoint.load(model, tmp_path / "out")
        assert_same_tensors(export(model, tmp_path / "again"), before)
        return
    fits = rf"convert the model with BlockwiseFP8TrainingConfig\(power_of_2_scales={of_files is FP8_POW2}\)"
    with pytest.warns(UserWarning, match=rf"load: the scales of 0\.weight in .* are .*; .*, {fits}") as said:
        checkpoint.load(model, tmp_path / "out")
    assert len(said) == 1


# --- memory next to the model: a layer's tensors, however many layers there are ---------------------------------------

WIDTH = 512
LAYER = WIDTH * WIDTH


@both_masters
@pytest.mark.parametrize("format", ("fp8_block", "nvfp4_compressed_tensors"))
def test_export_and_load_hold_a_layer(format, masters, tmp_path):
    """Its payload and what it takes to quantize it, and the file that fills."""
    config, written, read = replace(FORMATS[format], master_weights=masters), [], []
    for count in (3, 24):
        folder, model = tmp_path / str(count), alike_layers(config, WIDTH, count)
        written.append(peak_of(checkpoint.export, model, folder, format, shard_bytes=LAYER))
        read.append(peak_of(checkpoint.load, alike_layers(config, WIDTH, count), folder))
    for few, many in (written, read):
        assert 0 < many <= few + LAYER // 10, (few, many)
