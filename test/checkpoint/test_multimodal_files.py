"""Files of vision-language models: other prefixes than the model has, and experts that are stored transposed."""

import json
import re
import shutil
import warnings

import pytest
import torch
from exported_models import FORMATS, SMALL, export, filled, save, tensors_in, values_of
from helpers import FP8, assert_same_tensors
from readers import check_folder
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, recommended_layers
from torchao_blockwise.checkpoint.model_tensors import tensors_of
from torchao_blockwise.cli import main

transformers = pytest.importorskip("transformers", "5.20")
# All dims above 128 are multiples of it, as transformers' decoder of FP8 needs.
_TEXT = SMALL | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION |= {"image_size": 32, "patch_size": 8, "projection_dim": 128}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
# {family: (text config, vision config)}
FAMILIES = {
    "llava": ({}, _VISION),
    "gemma3": ({}, _VISION),
    "paligemma": ({}, _VISION),
    "qwen3_vl_moe": (
        _EXPERTS | {"rope_parameters": _MROPE},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
         "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str, config=None):
    text, vision = FAMILIES[family]
    made = transformers.AutoConfig.for_model(family).to_dict()
    options = {"text_config": made["text_config"] | _TEXT | text, "vision_config": made["vision_config"] | vision}
    options["text_config"].pop("layer_types", None)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(family, **options))
    if config is not None:
        quantize_(model, config, filter_fn=recommended_layers(model, config))
    return model


def released(family: str, folder):
    """A model, and its tensors in a folder, as the files of released models hold them."""
    model = model_of(family)
    model.save_pretrained(folder / "saved")
    shutil.copytree(folder / "saved", folder / "released")
    found = {
        re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): x.mT.contiguous() if ".experts." in name else x
        for name, x in tensors_in(folder / "saved").items()
    }
    save(found, folder / "released")
    return model, found


def plain_names(found) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in found.items() if not name.endswith("_scale_inv")}


@every_family
def test_files_of_released_models_are_loaded(family, tmp_path):
    """Also those that are saved again, under the names that the model read."""
    model, found = released(family, tmp_path)
    for folder in ("released", "saved"):
        again = filled(model_of(family, FP8))
        checkpoint.load(again, tmp_path / folder)
        values = {name: values_of(x) for name, x in tensors_of(again).items()}
        assert_same_tensors(values, {name: x.detach() for name, x in tensors_of(model).items()})
        written = export(again, tmp_path / f"{folder}_exported")
        if folder == "released":
            assert plain_names(written) == {name: x.shape for name, x in found.items()}
        third = filled(model_of(family, FP8))
        checkpoint.load(third, tmp_path / f"{folder}_exported")
        assert_same_tensors(export(third, tmp_path / f"{folder}_again"), written)


@pytest.mark.parametrize("family", ("llava", "gemma3"))
def test_files_of_both_kinds_are_loaded_in_turn(family, tmp_path):
    """Also after a load that failed, and into a model that transformers has loaded."""
    model, found = released(family, tmp_path)
    (tmp_path / "broken").mkdir()
    save({name: x for name, x in found.items() if "q_proj" not in name}, tmp_path / "broken")
    loaded = type(model).from_pretrained(tmp_path / "released")
    for again in (filled(model_of(family, FP8)), loaded):
        for folder in ("saved", "broken", "saved", "released", "saved", "released"):
            if folder == "broken":
                with pytest.raises(KeyError, match="q_proj"):
                    checkpoint.load(again, tmp_path / folder)
            else:
                checkpoint.load(again, tmp_path / folder)


@every_family
def test_files_of_released_models_train(family, tmp_path):
    pytest.importorskip("accelerate")
    from torchao_blockwise.integrations.transformers import from_pretrained

    _, found = released(family, tmp_path)
    model = from_pretrained(tmp_path / "released", "fp8")
    assert plain_names(export(model, tmp_path / "out")) == {name: x.shape for name, x in found.items()}
    again = from_pretrained(tmp_path / "out", "fp8", trainable="adapters")
    assert_same_tensors(export(again, tmp_path / "again"), tensors_in(tmp_path / "out"))


CONVERTED = [(family, "fp8_block", "released") for family in FAMILIES]
CONVERTED += [("qwen3_vl_moe", "fp8_block", "saved"), ("qwen3_vl_moe", "nvfp4_compressed_tensors", "released")]


@pytest.mark.filterwarnings("ignore:export")
@pytest.mark.parametrize(("family", "format", "folder"), CONVERTED)
def test_convert_writes_what_export_writes(family, format, folder, tmp_path):
    """Engines read the experts of Qwen3-VL-MoE transposed. In NVFP4, both elements of a byte are of one row."""
    released(family, tmp_path)
    assert main(["convert", str(tmp_path / folder), str(tmp_path / "out"), "--to", format]) == 0
    assert min(check_folder(tmp_path / "out", format).values()) > 2
    model = model_of(family)
    checkpoint.load(model, tmp_path / folder)
    quantize_(model, FORMATS[format], filter_fn=recommended_layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        written = export(model, tmp_path / "exported", format)
    assert_same_tensors(tensors_in(tmp_path / "out"), written)
    settings = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("out", "exported")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    metadata = {name: x.shape for name, x in written.items()}
    assert {n: s for n, (_, s) in checkpoint.quantized_weights(model, format).metadata().items()} == metadata
    assert all(x.is_contiguous() for _, x in checkpoint.quantized_weights(model, format))


@every_family
def test_transformers_reads_what_it_has_loaded(family, tmp_path):
    """Names of a model that transformers has loaded, and its values: those of weights that are not quantized."""
    model, found = released(family, tmp_path)
    loaded = type(model).from_pretrained(tmp_path / "released")
    chosen = recommended_layers(loaded)
    quantize_(loaded, FP8, filter_fn=chosen & (lambda m, fqn: not fqn.endswith("experts")))
    assert plain_names(export(loaded, tmp_path / "out")) == {name: x.shape for name, x in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    experts = [name for name in tensors_of(model) if ".experts." in name]
    assert bool(experts) is (family == "qwen3_vl_moe")
    values, read = tensors_of(model), tensors_of(again)
    for name in (*experts, "model.language_model.embed_tokens.weight"):
        assert torch.equal(read[name], values[name])
