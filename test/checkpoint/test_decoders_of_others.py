"""Code of other packages decodes our files to our values; where it does not, a warning says so."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
import torch
from exported_models import FORMATS, SMALL, decoded, export, language_model, tensors_in, tiny_mixture
from helpers import FP8, NVFP4, mlp
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    checkpoint,
    is_linear,
    ops,
    recommended_layers,
    skip_fqns,
    skip_lm_head,
)
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
FEATURES = (208, 304, 144)
PLAIN = PlainLayers(["lm_head"], [])


def whole_blocks(kind: str, config) -> torch.nn.Module:
    """Of which transformers reads all blocks."""
    if kind == "deepseek_v4":
        model = tiny_mixture(kind, "cpu")
        quantize_(
            model, config, filter_fn=recommended_layers(model) & skip_fqns("*.q_a_proj", "*.q_b_proj", "*.kv_proj")
        )
        return model
    return language_model(kind, config, hidden_size=256, head_dim=64, intermediate_size=384)


def loaded_by_transformers(folder, settings) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "format"),
    (
        ("Llama", "fp8_block"),
        ("Qwen3", "fp8_block"),
        ("deepseek_v4", "fp8_block_ue8m0"),
        ("Llama", "nvfp4_compressed_tensors"),
    ),
)
def test_transformers(kind, format, tmp_path):
    """Dequantized on the CPU; NVFP4 by compressed-tensors."""
    transformers = pytest.importorskip("transformers", "5.20")
    model = whole_blocks(kind, FORMATS[format])
    found = export(model, tmp_path / "out", format)
    if format.startswith("nvfp4"):
        pytest.importorskip("compressed_tensors")
        settings = transformers.CompressedTensorsConfig(run_compressed=False)
    else:
        settings = transformers.FineGrainedFP8Config(dequantize=True)
    loaded = loaded_by_transformers(tmp_path / "out", settings)
    checked = 0
    for n, p in model.named_parameters():
        if isinstance(p, MasterWeightTensor):
            # In NVFP4 joined layers are quantized again for the files.
            is_packed = format.startswith("nvfp4")
            ours = decoded(found, n) if is_packed else ops.dequantize(p.quantized(), dtype=p.dtype, columns=p.shape[-1])
            theirs = loaded.get_parameter(n).detach()
            torch.testing.assert_close(theirs, ours.to(theirs.dtype), rtol=0.01, atol=1e-4)
            checked += 1
    assert checked > 5


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


def test_torch_distributed_checkpoint(tmp_path):
    """PyTorch's reader of quantized files; ragged blocks too."""
    reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    checkpoint.export(mlp(FP8, features=(200, 300, 130)), tmp_path / "out", shard_bytes=60_000)
    found = tensors_in(tmp_path / "out")
    state = {name: torch.zeros(found[name].shape) for name in ("0.weight", "2.weight")}
    dcp.load(state, storage_reader=reader.QuantizedHuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    for name, theirs in state.items():
        assert_bitwise_equal(theirs, decoded(found, name), name)


def test_compressed_tensors(tmp_path):
    """Its decompressor gives the values of our files, bit for bit in fp32; the settings are those of its preset."""
    pytest.importorskip("compressed_tensors")
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    found = export(mlp(NVFP4, features=FEATURES), tmp_path / "out", "nvfp4_compressed_tensors")
    group = layouts.COMPRESSED_TENSORS.settings(PLAIN)["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**group)
    preset = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    ours, theirs = ({k: v for k, v in x.weights.model_dump().items() if k != "scale_dtype"} for x in (scheme, preset))
    assert ours == theirs
    for layer in ("0", "2"):
        state = {name: found[f"{layer}.weight{name}"].clone() for name in layouts.COMPRESSED_TENSORS.suffixes}
        state = {f"weight{name}": x for name, x in state.items()}
        codes = found[f"{layer}.weight_packed"]
        scale = (found[f"{layer}.weight_scale"].float() / found[f"{layer}.weight_global_scale"]).repeat_interleave(
            16, -1
        )
        expected = scale * layouts.COMPRESSED_TENSORS.format.element.decode(codes, 2 * codes.shape[-1]).float()
        theirs = compressors.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        torch.testing.assert_close(theirs.float(), expected.to(theirs.dtype).float(), rtol=0, atol=0)


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
    settings = layouts.MODELOPT.settings(PLAIN)
    assert convert(layouts.hf_quant_config(settings)).items() <= settings.items()
