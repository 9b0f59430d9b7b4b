"""Tiny models of ten families, their files in every format, and the values that other packages decode from these."""

import warnings

import pytest
import torch
from exported_models import FORMATS, decoded, export, language_model
from torchao.quantization import quantize_

from torchao_blockwise import recommended_layers
from torchao_blockwise.checkpoint.layouts import COMPRESSED_TENSORS
from torchao_blockwise.checkpoint.model_tensors import parts_on_disk, tensors_of

transformers = pytest.importorskip("transformers", "5.0")

# All dims above 128 are multiples of it, as transformers' decoder of FP8 needs.
_SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "pad_token_id": 0}
FAMILIES = {
    "Llama": {}, "Qwen3": {}, "Mistral": {}, "Gemma3Text": {}, "Phi3": {}, "Qwen3Moe": {}, "Mixtral": {},
    "Qwen2": {"layer_types": ["full_attention"] * 2},
    "GptOss": {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 256},
    "DeepseekV3": {"q_lora_rank": 128, "kv_lora_rank": 96},
}  # fmt: skip


def model_of(family: str, **more):
    model = language_model(family, None, **(_SIZES | FAMILIES[family] | more))
    for name, x in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            x.copy_(torch.randn(x.shape))
    return model


def write(family: str, format: str, folder, **more):
    """(model, tensors of its files), which `export` writes, or `save_pretrained` for the format "plain"."""
    model = model_of(family, **more)
    if format == "plain":
        model.save_pretrained(folder)
        return model, {}
    quantize_(model, FORMATS[format], filter_fn=recommended_layers(model))
    return model.eval(), export(model, folder, format)


def loaded_by_transformers(folder, dtype: torch.dtype, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def decoded_by_others(found: dict[str, torch.Tensor], name: str, format: str) -> torch.Tensor:
    """The values of a tensor in files as compressed-tensors decodes them, or by the rules of the format.

    compressed-tensors decodes to bf16.
    """
    if name in found and found[name].is_floating_point() and found[name].itemsize > 1:
        return found[name]
    if format != COMPRESSED_TENSORS.name:
        return decoded(found, name)
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = COMPRESSED_TENSORS.settings["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**group)
    packed, scale, factor = (found[name + suffix] for suffix in COMPRESSED_TENSORS.suffixes)
    # It takes matrices; GPT-OSS has all experts of a layer in one tensor.
    values = []
    for codes, scales in zip(packed.reshape(-1, *packed.shape[-2:]), scale.reshape(-1, *scale.shape[-2:])):
        state = dict(zip(("weight_packed", "weight_scale", "weight_global_scale"), (codes, scales, factor)))
        values.append(compressors.NVFP4PackedCompressor.decompress(state, scheme)["weight"])
    return torch.stack(values).view(*packed.shape[:-1], -1)


def expected_values(model, found: dict[str, torch.Tensor], format: str):
    """Yield (part of a tensor of the model, what it is to be) for each tensor in the files."""
    tensors = tensors_of(model)
    for name, parts in parts_on_disk(model).items():
        for part in parts:
            if part.name in found or f"{part.name}_packed" in found:
                yield part.name, part.of(tensors[name].detach()), decoded_by_others(found, part.name, format)
