"""Checkpoints in NVFP4 as compressed-tensors has them: the bytes that products read, and others' code reads them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import NVFP4, mlp, replace
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, NVFP4Tensor, checkpoint, linears_and_experts, ops, skip_lm_head
from torchao_blockwise.checkpoint.fused_layers import fused_layers
from torchao_blockwise.checkpoint.layouts import COMPRESSED_TENSORS
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.formats import E2M1, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

from exported_models import digest, language_model, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")
FORMAT = COMPRESSED_TENSORS.name
PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def export(model, folder) -> dict[str, torch.Tensor]:
    checkpoint.export(model, folder, FORMAT)
    return tensors_in(folder)


def decoded(found: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """As compressed-tensors says: a code times its block scale, which the tensor's divides."""
    packed, scale, global_scale = (found[f"{layer}.{part}"] for part in PARTS)
    codes = E2M1.decode(packed, 2 * packed.shape[-1]).float()
    return codes * (scale.float() / global_scale).repeat_interleave(16, -1)


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
def test_files_have_the_bytes_that_products_read(masters, tmp_path):
    """Layers that no engine joins: payload and block scales as they are, one row of these for 16."""
    model = mlp(replace(NVFP4, master_weights=masters), features=(208, 304, 130))
    found = export(model, tmp_path / "out")
    assert found.keys() == {f"{i}.{n}" for i in (0, 2) for n in (*PARTS, "bias")}
    for i in (0, 2):
        weight = model[i].weight
        operand = weight.quantized() if masters else weight.operand()
        assert digest(found[f"{i}.weight_packed"]) == digest(operand.qdata)
        scale = found[f"{i}.weight_scale"].view(torch.uint8)
        assert_bitwise_equal(scale[::16], operand.scale.view(torch.uint8))
        assert_bitwise_equal(scale, scale[::16].repeat_interleave(16, 0)[: len(scale)])
        # The factor of the whole tensor is rounded as its reciprocal.
        values = ops.dequantize(operand, dtype=torch.float32, columns=weight.shape[-1])
        torch.testing.assert_close(decoded(found, str(i)), values, rtol=3e-7, atol=0)


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe", "DeepseekV3"))
def test_layers_that_engines_join_have_one_tensor_scale(name, masters, tmp_path):
    """That of the largest amax; the payload is what quantizing with it gives: masters, or what Parameters decode to."""
    model = language_model(name, replace(NVFP4, master_weights=masters))
    with pytest.warns(UserWarning, match="engines as one with others of another .* quantized anew: ") as warned:
        found = export(model, tmp_path / "out")
    (message,) = (str(w.message) for w in warned if "quantized anew" in str(w.message))
    amaxes: dict[str, torch.Tensor] = {}
    kind = MasterWeightTensor if masters else NVFP4Tensor
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, kind)}
    own = {
        n: p.hp.detach().abs().amax() if masters else p.global_scale * (E2M1.max * NVFP4_16X16.scale_max)
        for n, p in weights.items()
    }
    fused = fused_layers(own)
    for n, amax in own.items():
        amaxes[fused[n]] = torch.maximum(amaxes.get(fused[n], torch.zeros(())), amax)
    assert len(amaxes) < len(weights)
    checked = 0
    for n, p in weights.items():
        if f"{n}_packed" not in found:
            continue  # experts of one Parameter
        amax = amaxes[fused[n]]
        wanted = p.operand() if not masters and amax == own[n] else None
        if wanted is None:
            values = p.hp.detach() if masters else p.dequantize()
            wanted = ops.quantize(values, NVFP4_16X16, tensor_amax=amax).rowwise
        assert digest(found[f"{n}_packed"]) == digest(wanted.qdata)
        assert_bitwise_equal(found[f"{n}_global_scale"], wanted.global_scale.reciprocal().reshape(1))
        assert amax == own[n] or re.sub(r"\.\d+\b", ".*", n) in message
        checked += 1
    assert checked
    scales: dict[str, torch.Tensor] = {}
    for n, group in fused_layers(n.removesuffix("_global_scale") for n in found if n.endswith("_global_scale")).items():
        assert_bitwise_equal(found[f"{n}_global_scale"], scales.setdefault(group, found[f"{n}_global_scale"]), n)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "nvfp4-pack-quantized" and "lm_head" in settings["ignore"]


def test_equal_scales_are_left_alone(tmp_path, recwarn):
    """Where training gave joined layers one tensor scale, the bytes that trained go out."""
    model = language_model("Llama", None)
    for layer in model.model.layers:
        for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            for one in joined:
                holder = layer.self_attn if one[0] in "qkv" else layer.mlp
                with torch.no_grad():
                    getattr(holder, one).weight[0, 0] = 1.0
    quantize_(model, NVFP4, filter_fn=linears_and_experts() & skip_lm_head())
    found = export(model, tmp_path / "out")
    assert not [w for w in recwarn if "anew" in str(w.message)]
    weight = model.model.layers[0].self_attn.k_proj.weight.quantized()
    assert digest(found["model.layers.0.self_attn.k_proj.weight_packed"]) == digest(weight.qdata)


def test_rows_off_16_are_refused_and_leave_nothing(tmp_path):
    model = mlp(NVFP4, features=(200, 304, 144))
    with pytest.raises(ValueError, match=r"0\.weight has rows that are no multiple of 16, .* leave the layer unconv"):
        checkpoint.export(model, tmp_path / "out", FORMAT)
    assert list(tmp_path.iterdir()) == []


def test_metadata_says_what_comes(tmp_path):
    weights = checkpoint.quantized_weights(mlp(NVFP4, features=(208, 304, 144)), FORMAT)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in weights}


def test_compressed_tensors_reads_it(tmp_path):
    """Its decompressor gives the values of our files, bit for bit in fp32."""
    pytest.importorskip("compressed_tensors")
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    found = export(mlp(NVFP4, features=(208, 304, 144)), tmp_path / "out")
    group = COMPRESSED_TENSORS.settings(PlainLayers([], []))["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**group)
    preset = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    ours = {k: v for k, v in scheme.weights.model_dump().items() if k != "scale_dtype"}
    assert ours == {k: v for k, v in preset.weights.model_dump().items() if k != "scale_dtype"}
    for layer in ("0", "2"):
        state = {part: found[f"{layer}.{part}"].clone() for part in PARTS}
        theirs = compressors.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        torch.testing.assert_close(theirs.float(), decoded(found, layer).to(theirs.dtype).float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ("Llama",))
def test_transformers_loads_it(name, tmp_path):
    """Through compressed-tensors, with the values of the files."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers", "5.0")
    model = language_model(name, NVFP4)
    with pytest.warns(UserWarning, match="quantized anew"):
        found = export(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
    )
    layers = [n.removesuffix(".weight_packed") for n in found if n.endswith("_packed")]
    assert layers
    for layer in layers:
        theirs = loaded.get_submodule(layer).weight.detach()
        torch.testing.assert_close(theirs, decoded(found, layer).to(theirs.dtype), rtol=0.01, atol=1e-6)
