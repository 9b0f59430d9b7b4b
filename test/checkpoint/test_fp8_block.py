"""Checkpoints in blockwise FP8: the bytes that products read go out and come back, and others' code reads them."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import FP8, FP8_POW2, NVFP4, mlp, replace
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    checkpoint,
    is_linear,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import MODELS, SMALL, decoded_fp8, digest, language_model, logits, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")

every_model = pytest.mark.parametrize("name", MODELS)


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", (FP8, FP8_POW2, replace(FP8, master_weights=False)), ids=("fp8", "pow2", "quantized")
)
def test_files_have_the_bytes_that_products_read(config, tmp_path):
    model = mlp(config, features=(200, 300, 130))
    checkpoint.export(model, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == {f"{i}.{n}" for i in (0, 2) for n in ("weight", "weight_scale_inv", "bias")}
    for i in (0, 2):
        weight = model[i].weight
        operand = weight.quantized() if config.master_weights else weight.operand()
        assert digest(found[f"{i}.weight"]) == digest(operand.qdata)
        assert digest(found[f"{i}.weight_scale_inv"]) == digest(operand.scale)
        assert found[f"{i}.weight_scale_inv"].dtype == torch.float32
        assert_bitwise_equal(found[f"{i}.bias"], model[i].bias.detach())


@every_model
def test_models_of_transformers(name, tmp_path):
    """Names are those of save_pretrained; each weight decodes to what the model trains with."""
    model = language_model(name)
    checkpoint.export(model, tmp_path / "out", shard_bytes=200_000)
    found, plain = tensors_in(tmp_path / "out"), language_model(name, None)
    plain.save_pretrained(tmp_path / "plain")
    expected = tensors_in(tmp_path / "plain")
    assert {n for n in found if not n.endswith("_scale_inv")} == expected.keys()
    quantized = [n for n in expected if f"{n}_scale_inv" in found]
    assert quantized and not any(
        "norm" in n or "embed" in n or "lm_head" in n or n.endswith("gate.weight") for n in quantized
    )
    for n in quantized:
        decoded = decoded_fp8(found[n], found[f"{n}_scale_inv"])
        error = (decoded - expected[n].float()).norm() / expected[n].float().norm()
        assert found[n].dtype == torch.float8_e4m3fn and error < 0.04, (n, error)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    assert "lm_head" in settings["modules_to_not_convert"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ("Llama", "Qwen3"))
def test_transformers_loads_it(name, tmp_path):
    """Dequantized on the CPU: the values of our decoding."""
    transformers = pytest.importorskip("transformers", "5.0")
    options = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | MODELS[name] | options))
    model = transformers.AutoModelForCausalLM.from_config(config)
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    checkpoint.export(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    for layer, ours in model.named_modules():
        if isinstance(getattr(ours, "weight", None), MasterWeightTensor):
            weight = ours.weight.quantized()
            decoded = decoded_fp8(weight.qdata, weight.scale)
            torch.testing.assert_close(loaded.get_submodule(layer).weight.detach(), decoded, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("width", (64, 128, 160, 192, 200, 256, 320, 576))
def test_a_warning_says_where_transformers_misreads(width, tmp_path):
    """It does where it raises, or where values differ: of gate and up [width, 128], and of down [128, width]."""
    transformers = pytest.importorskip("transformers", "5.20")
    options = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | options | {"intermediate_size": width})))
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][:-1]
    for layer in layers:
        # No two blocks have the same scale.
        layer.weight.data *= torch.linspace(1, 9, layer.weight.numel()).view_as(layer.weight)
    quantize_(model, FP8, filter_fn=is_linear() & skip_lm_head())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpoint.export(model, tmp_path / "out")
    warned = [str(w.message) for w in found if "where transformers dequantizes" in str(w.message)]
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
            dtype=torch.float32,
        )
        wrong = []
        for name, weight in model.named_parameters():
            if isinstance(weight, MasterWeightTensor):
                operand = weight.quantized()
                decoded = decoded_fp8(operand.qdata, operand.scale)
                if not torch.allclose(loaded.get_parameter(name).detach(), decoded, rtol=0.01, atol=1e-6):
                    wrong.append(name)
    except (RuntimeError, ValueError):
        wrong = ["raises"]
    assert bool(warned) == bool(wrong), (wrong, warned)
    if warned:
        names = re.findall(r"mlp\.(\w+)\.weight (\[.*?\])", warned[0])
        up = f"[{width}, 128]"
        assert names == [("down_proj", f"[128, {width}]"), ("gate_proj", up), ("up_proj", up)]
        assert "q_proj" not in warned[0]


def test_a_cut_block_is_quantized_anew(tmp_path):
    """gate and up of experts of 192 rows share the block of rows 128 to 255."""
    model = language_model("Qwen3Moe", None)
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.Qwen3MoeConfig(**(SMALL | MODELS["Qwen3Moe"] | {"moe_intermediate_size": 192}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    with pytest.warns(UserWarning, match=r"6 weights begin inside of a block .* quantized anew: .*up_proj"):
        checkpoint.export(model, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    up = "model.layers.0.mlp.experts.1.up_proj.weight"
    decoded = decoded_fp8(found[up], found[f"{up}_scale_inv"])
    expected = model.model.layers[0].mlp.experts.gate_up_proj.hp[1, 192:]
    assert found[f"{up}_scale_inv"].shape == (2, 2)
    assert (decoded - expected).norm() < 0.04 * expected.norm()


# --- in ---------------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_a_converted_model_loads_it(name, masters, tmp_path):
    config = replace(FP8, master_weights=masters)
    model = language_model(name, config)
    checkpoint.export(model, tmp_path / "out")
    other = language_model(name, config)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.ones(p.shape))
    assert not torch.equal(logits(other), logits(model))
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    checkpoint.export(other, tmp_path / "again")
    before, after = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "again")
    assert before.keys() == after.keys()
    for n, x in before.items():
        assert digest(x) == digest(after[n]), n


@every_model
def test_an_unconverted_model_loads_the_values(name, tmp_path):
    model = language_model(name, replace(FP8, master_weights=False))
    checkpoint.export(model, tmp_path / "out")
    plain = language_model(name, None)
    checkpoint.load(plain, tmp_path / "out")
    for n, p in model.named_parameters():
        expected = p.dequantize() if isinstance(p, BlockwiseFP8Tensor) else p
        assert_bitwise_equal(plain.get_parameter(n).detach(), expected.detach(), n)


@every_model
@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_plain_files_load(name, masters, tmp_path):
    plain = language_model(name, None)
    plain.save_pretrained(tmp_path / "plain")
    model = language_model(name, replace(FP8, master_weights=masters))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros(p.shape))
    checkpoint.load(model, tmp_path / "plain")
    assert_bitwise_equal(logits(model), logits(language_model(name, replace(FP8, master_weights=masters))))


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_refusals_of_export(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"format must be one of fp8_block, .*, got 'fp8_blok'; did you mean 'fp8_block'",
    ):
        checkpoint.export(mlp(FP8), tmp_path / "out", format="fp8_blok")
    with pytest.raises(ValueError, match="no weight of Sequential is converted; call quantize_ first"):
        checkpoint.export(mlp(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"0\.weight trains in nvfp4_16x16, and fp8_block holds fp8_128x128"):
        checkpoint.export(mlp(NVFP4), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        checkpoint.export(mlp(FP8), tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


def test_nothing_is_half_written(tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.export(mlp(FP8), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def _changed(folder, change) -> None:
    found = tensors_in(folder)
    change(found)
    safetensors.save_file(found, folder / "model.safetensors")


WRONG = {
    "missing scale": (
        lambda t: t.pop("0.weight_scale_inv"),
        ValueError,
        r"0\.weight in .*model\.safetensors is in F8_E4M3 and has no 0\.weight_scale_inv",
    ),
    "NaN": (
        lambda t: t["2.weight_scale_inv"].fill_(float("nan")),
        ValueError,
        r"2\.weight_scale_inv in .* has scales that are no positive numbers",
    ),
    "grid": (
        lambda t: t.update({"0.weight_scale_inv": torch.ones(3, 3)}),
        ValueError,
        r"has shape \[3, 3\], the model wants \[2, 1\]",
    ),
    "shape": (
        lambda t: t.update({"2.bias": torch.ones(7)}),
        ValueError,
        r"2\.bias in .* has shape \[7\], the model wants \[32\]",
    ),
    "missing": (lambda t: t.pop("2.bias"), KeyError, r"has no 2\.bias"),
    "unknown": (lambda t: t.update({"3.bias": torch.ones(7)}), KeyError, r"no place for 3\.bias"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit_change_nothing(change, error, message, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out")
    _changed(tmp_path / "out", change)
    model = mlp(FP8)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(error, match=message):
        checkpoint.load(model, tmp_path / "out")
    for n, x in model.state_dict().items():
        assert_bitwise_equal(x, before[n], n)


def test_files_of_others_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        checkpoint.load(mlp(FP8), tmp_path)
    checkpoint.export(mlp(FP8), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ValueError, match="quant_method is 'awq'; files of 'fp8', 'compressed-tensors', 'modelopt',"):
        checkpoint.load(mlp(FP8), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ValueError, match=r"weight_block_size is None; files with \[128, 128\] are read"):
        checkpoint.load(mlp(FP8), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*copy it again"):
        checkpoint.load(mlp(FP8), tmp_path / "out")


def test_torch_distributed_checkpoint_reads_it(tmp_path):
    """PyTorch's reader of quantized files decodes them to our values; ragged blocks too."""
    reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    checkpoint.export(mlp(FP8, features=(200, 300, 130)), tmp_path / "out", shard_bytes=60_000)
    found = tensors_in(tmp_path / "out")
    names = ("0.weight", "2.weight")
    state = {name: torch.zeros(found[name].shape) for name in names}
    dcp.load(state, storage_reader=reader.QuantizedHuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    for name in names:
        ours = decoded_fp8(found[name], found[f"{name}_scale_inv"])
        assert_bitwise_equal(state[name], ours, name)


def test_what_transformers_passes_over_is_passed_over(tmp_path):
    """DeepSeek's and GLM's files hold a layer that predicts further tokens, which their models have not."""
    model = language_model("DeepseekV3")
    checkpoint.export(model, tmp_path / "out")
    file = next((tmp_path / "out").glob("*.safetensors"))
    tensors = safetensors.load_file(file)
    further = {
        name.replace("layers.1.", "layers.61."): x.clone() for name, x in tensors.items() if "layers.1.mlp.sh" in name
    }
    assert any(name.endswith("weight_scale_inv") for name in further)
    more = {
        "model.layers.0.self_attn.kv_b_proj.k_scale": torch.ones(()),
        "model.layers.61.eh_proj.weight": torch.ones(4),
    }
    more |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.save_file(tensors | further | more, file, metadata={"format": "pt"})
    other = language_model("DeepseekV3")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    safetensors.save_file(tensors | {"model.layers.7.norm.weight": torch.ones(4)}, file, metadata={"format": "pt"})
    with pytest.raises(KeyError, match=r"no place for model\.layers\.7\.norm\.weight"):
        checkpoint.load(other, tmp_path / "out")
