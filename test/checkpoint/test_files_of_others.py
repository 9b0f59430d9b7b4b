"""Files of other tools, which hold our blocks under other names, or what ours never do; and our files in their hands.

Where their code does not decode our files to our values, a warning says so.
"""

import importlib
import json
import re
import warnings

import pytest
import torch
from exported_models import (
    SMALL,
    compressed_tensors,
    decoded,
    export,
    filled,
    language_model,
    logits,
    operand_of,
    save,
    tensors_in,
    values_of,
)
from helpers import FP8, NVFP4, assert_same_tensors, both_masters, mlp, replace
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, checkpoint, is_linear, linears_and_experts, skip_lm_head
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.files import config_and_settings
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

FEATURES = (208, 304, 130)
OUR_FEATURES = (208, 304, 144)
PLAIN = ["lm_head"], []
masters_quantized_or_plain = pytest.mark.parametrize(
    "masters", (True, False, None), ids=("masters", "quantized", "plain")
)


def converted(masters: bool | None, features):
    return mlp(None if masters is None else replace(FP8, master_weights=masters), features)


@masters_quantized_or_plain
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_fp8_blocks_of_compressed_tensors(dtype, masters, tmp_path):
    found = export(mlp(FP8, FEATURES, seed=1), tmp_path / "out")
    for i in (0, 2):
        found[f"{i}.weight_scale"] = found.pop(f"{i}.weight_scale_inv").to(dtype)
        found |= {f"{i}.q_scale": torch.ones(()), f"{i}.prob_scale": torch.ones(1)}
    save(found, tmp_path / "out")
    content = {"text_config": {"quantization_config": compressed_tensors()}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(content))
    model = converted(masters, FEATURES)
    checkpoint.load(model, tmp_path / "out")
    for i in (0, 2):
        expected = decoded(found, f"{i}.weight", f"{i}.weight_scale")
        torch.testing.assert_close(values_of(model[i].weight), expected, rtol=2**-22, atol=0)
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("nested", (False, True), ids=("", "text_config"))
def test_layers_of_two_formats_are_read(nested, tmp_path):
    """compressed-tensors has groups of layers: the first in NVFP4, the other in blocks of FP8."""
    fp8 = export(mlp(FP8, seed=1), tmp_path / "fp8")
    nvfp4 = export(mlp(NVFP4, seed=1), tmp_path / "nvfp4", "nvfp4_compressed_tensors")
    found = {name: x for name, x in fp8.items() if name.startswith("2.")}
    found["2.weight_scale"] = found.pop("2.weight_scale_inv")
    save(found | {name: x for name, x in nvfp4.items() if name.startswith("0.")}, tmp_path / "other")
    groups = {x: x for x in (layouts.PACKED, layouts.FLOAT)}
    settings = {"quantization_config": compressed_tensors("mixed-precision", **groups)}
    (tmp_path / "other" / "config.json").write_text(json.dumps({"text_config": settings} if nested else settings))
    model, alike = mlp(), {"fp8": mlp(), "nvfp4": mlp()}
    checkpoint.load(model, tmp_path / "other")
    for name, other in alike.items():
        checkpoint.load(other, tmp_path / name)
    assert_bitwise_equal(model[0].weight, alike["nvfp4"][0].weight)
    assert_bitwise_equal(model[2].weight, alike["fp8"][2].weight)
    assert config_and_settings(tmp_path / "other")[0] == ({"text_config": {}} if nested else {})


@masters_quantized_or_plain
def test_scales_of_zero_of_blocks_of_zeros(masters, tmp_path):
    """Minus zeros too; the block next to it is not disturbed."""
    features = (256, 300, 130)
    found = export(mlp(FP8, features, seed=1), tmp_path / "out")
    found["0.weight"].view(torch.uint8)[128:256, :128] = 0x80
    found["0.weight_scale_inv"][1, 0] = 0
    save(found, tmp_path / "out")
    model = converted(masters, features)
    checkpoint.load(model, tmp_path / "out")
    assert_bitwise_equal(values_of(model[0].weight).abs(), decoded(found, "0.weight").abs())
    # Payload and scales are those of a block of zeros.
    assert masters is not False or model[0].weight.scale.min() > 0
    assert model(torch.ones(1, 256)).isfinite().all()


@masters_quantized_or_plain
@pytest.mark.parametrize("code", (0x7F, 0xFF))
def test_codes_that_are_nan_stay_so(code, masters, tmp_path):
    """No finite number comes of them, neither in the model nor in what it computes; an export names the weight."""
    found, places = export(mlp(FP8, FEATURES, seed=1), tmp_path / "out"), [(3, 5), (140, 199), (303, 0)]
    for place in places:
        found["0.weight"].view(torch.uint8)[place] = code
    save(found, tmp_path / "out")
    model = converted(masters, FEATURES)
    checkpoint.load(model, tmp_path / "out")
    assert values_of(model[0].weight).isnan().nonzero().tolist() == [list(place) for place in places]
    assert model[0](torch.ones(1, FEATURES[0]))[0, [3, 140, 303]].isnan().all()
    if masters is not None:
        with pytest.raises(ValueError, match=r"export: 0\.weight has NaN or Inf, so its quantized values"):
            checkpoint.export(model, tmp_path / "again")
        assert not (tmp_path / "again").exists()


@both_masters
@pytest.mark.parametrize("name", ("Qwen3Moe", "Mixtral"))
def test_experts_in_one_tensor_are_read(name, masters, tmp_path):
    """`gate_up_proj` and `gate_up_proj_scale_inv`, as a model has them, and not one by one as transformers writes."""
    config = replace(FP8, master_weights=masters)
    model = language_model(name, config)
    first = export(model, tmp_path / "first")
    found = {n: x for n, x in first.items() if ".experts." not in n}
    for n, p in model.named_parameters():
        if ".experts." in n:
            found |= {n: operand_of(p).qdata.clone(), f"{n}_scale_inv": operand_of(p).scale.clone()}
    save(found, tmp_path / "out")
    other = filled(language_model(name, config))
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    assert_same_tensors(export(other, tmp_path / "again"), first)


def test_gpt_oss_in_fp8_is_read(tmp_path):
    """`gate_up_proj_scale_inv` of experts [E, H, 2I]."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 256}
    language_model("GptOss", None, **sizes).save_pretrained(tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    names = [name for name in found if name.endswith("_proj") and ".experts." in name]
    for name in names:
        experts, rows, columns = found[name].shape
        found[name] = torch.randn(experts, rows, columns).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.rand(experts, -(-rows // 128), -(-columns // 128)) + 0.5
    assert len(names) == 4
    save(found, tmp_path / "out")
    model = language_model("GptOss", None, **sizes)
    checkpoint.load(model, tmp_path / "out")
    for name in names:
        assert_bitwise_equal(model.get_parameter(name).detach(), decoded(found, name), name)


# --- our files in the hands of others ---------------------------------------------------------------------------------


def loaded_by_transformers(folder, settings) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)


@pytest.mark.parametrize("width", (64, 128, 192, 200, 256, 320))
def test_a_warning_says_where_transformers_misreads(width, tmp_path):
    """It does where it raises, or where values differ: of gate and up [width, 128], and of down [128, width]."""
    transformers = pytest.importorskip("transformers", "5.20")
    options = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | options | {"intermediate_size": width})))
    for layer in [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][:-1]:
        # No two blocks have the same scale.
        layer.weight.data *= torch.linspace(1, 9, layer.weight.numel()).view_as(layer.weight)
    quantize_(model, FP8, filter_fn=is_linear() & skip_lm_head())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpoint.export(model, tmp_path / "out")
    warned = [str(w.message) for w in found if "if transformers dequantizes" in str(w.message)]
    held = tensors_in(tmp_path / "out")
    try:
        loaded = loaded_by_transformers(tmp_path / "out", transformers.FineGrainedFP8Config(dequantize=True))
        wrong = [
            name
            for name, weight in model.named_parameters()
            if isinstance(weight, MasterWeightTensor)
            and not torch.allclose(loaded.get_parameter(name).detach(), decoded(held, name), rtol=0.01, atol=1e-6)
        ]
    except (RuntimeError, ValueError):
        wrong = ["raises"]
    assert bool(warned) == bool(wrong), (wrong, warned)
    if warned:
        names = re.findall(r"mlp\.(\w+)\.weight (\[.*?\])", warned[0])
        up = f"[{width}, 128]"
        assert names == [("down_proj", f"[128, {width}]"), ("gate_proj", up), ("up_proj", up)]
        assert "q_proj" not in warned[0]


@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe", "Mixtral", "GptOss"))
def test_a_warning_says_where_transformers_misreads_nvfp4(name, tmp_path):
    """It does not apply the tensor scale of experts."""
    transformers = pytest.importorskip("transformers", "5.20")
    pytest.importorskip("compressed_tensors")
    model = language_model(name, None, hidden_size=256, head_dim=64, intermediate_size=384)
    quantize_(model, NVFP4, filter_fn=linears_and_experts() & skip_lm_head())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpoint.export(model, tmp_path / "out", "nvfp4_compressed_tensors")
    warned = [str(w.message) for w in found if "transformers loads wrong values" in str(w.message)]
    checkpoint.load(model, tmp_path / "out")
    loaded = loaded_by_transformers(tmp_path / "out", transformers.CompressedTensorsConfig(run_compressed=False))
    wrong = [
        n
        for n, p in model.named_parameters()
        if isinstance(p, MasterWeightTensor) and (loaded.get_parameter(n).detach() - p.hp).norm() > 0.01 * p.hp.norm()
    ]
    assert bool(warned) == bool(wrong), (wrong, warned)
    assert all("experts" in n for n in wrong)


def test_torch_distributed_checkpoint(tmp_path):
    """PyTorch's reader of quantized files; ragged blocks too."""
    reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    checkpoint.export(mlp(FP8, features=(200, 300, 130)), tmp_path / "out", shard_bytes=60_000)
    found = tensors_in(tmp_path / "out")
    state = {name: torch.zeros(found[name].shape) for name in ("0.weight", "2.weight")}
    dcp.load(state, storage_reader=reader.QuantizedHuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert_same_tensors(state, {name: decoded(found, name) for name in state})


def test_settings_are_those_of_a_preset_of_compressed_tensors():
    """Its decompressor gives the values of our files in test_from_pretrained.py."""
    pytest.importorskip("compressed_tensors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    group = layouts.COMPRESSED_TENSORS.settings["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**group)
    preset = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    ours, theirs = ({k: v for k, v in x.weights.model_dump().items() if k != "scale_dtype"} for x in (scheme, preset))
    assert ours == theirs


def test_model_optimizer(tmp_path):
    """Its own class for such weights gives our values; its config is ours, except for the producer's version."""
    pytest.importorskip("modelopt")
    theirs = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    found = export(mlp(NVFP4, features=OUR_FEATURES), tmp_path / "out", "nvfp4_modelopt")
    for i in (0, 2):
        payload, scale, factor = (found[f"{i}.weight{name}"] for name in layouts.MODELOPT.suffixes)
        held = theirs(torch.Size((len(payload), 2 * payload.shape[1])), torch.float32, payload)
        values = held.dequantize(dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
        # Factors are multiplied in another order.
        torch.testing.assert_close(values, decoded(found, f"{i}.weight"), rtol=3e-7, atol=0)
    convert = importlib.import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    settings = layouts.MODELOPT.quantization_config(*PLAIN)
    assert convert(layouts.hf_quant_config(settings)).items() <= settings.items()
