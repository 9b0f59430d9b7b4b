"""Code of other packages decodes our files to our values; where it does not, a warning says so."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
import torch
from exported_models import SMALL, decoded, export, language_model, tensors_in
from helpers import FP8, NVFP4, assert_same_tensors, mlp
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    checkpoint,
    is_linear,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.checkpoint import layouts

pytestmark = pytest.mark.usefixtures("no_interpreter")
FEATURES = (208, 304, 144)
PLAIN = ["lm_head"], []


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
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out", "nvfp4_modelopt")
    for i in (0, 2):
        payload, scale, factor = (found[f"{i}.weight{name}"] for name in layouts.MODELOPT.suffixes)
        held = theirs(torch.Size((len(payload), 2 * payload.shape[1])), torch.float32, payload)
        values = held.dequantize(dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
        # Factors are multiplied in another order.
        torch.testing.assert_close(values, decoded(found, f"{i}.weight"), rtol=3e-7, atol=0)
    convert = importlib.import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    settings = layouts.MODELOPT.quantization_config(*PLAIN)
    assert convert(layouts.hf_quant_config(settings)).items() <= settings.items()
