"""How transformers and engines decide, by the names in config.json, which layers of files are quantized."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

# As vLLM 0.33 runs them as one, over all of its models.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")


def transformers_skips(layer: str, ignored: list[str]) -> bool:
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    return not utils.should_convert_module(layer, ignored)


def vllm_skips(layer: str, ignored: list[str]) -> bool:
    """`is_layer_skipped` of vLLM 0.33, which is asked about fused layers and modules of experts."""
    layer = _as_engines_build_it(layer)
    path, _, last = layer.rpartition(".")
    if last in _FUSED:
        # A member may not exist: vLLM builds what files have.
        return any(f"{path}.{part}" in ignored for part in _FUSED[last])
    if "experts" in layer:
        return any(layer in name for name in ignored if "experts" in name)
    return layer in ignored


def modelopt_skips(layer: str, ignored: list[str]) -> bool:
    """`is_layer_excluded` of vLLM 0.33: exact names, what begins with them or contains them, and wildcards."""
    layer = _as_engines_build_it(layer)
    return vllm_skips(layer, ignored) or any(name in layer or fnmatch(layer, name) for name in ignored)


def compressed_tensors_skips(layer: str, ignored: list[str]) -> bool:
    """`match_name` of compressed-tensors 0.20, which vLLM asks about single experts too."""
    return any(
        re.match(name.removeprefix("re:"), layer) is not None if name.startswith("re:") else layer == name
        for name in ignored
    )


def _as_engines_build_it(layer: str) -> str:
    if match := _EXPERTS.match(layer):
        return match[1]
    path, _, last = layer.rpartition(".")
    return next((f"{path}.{fused}" for fused, parts in _FUSED.items() if last in parts), layer)


READERS = {
    "fp8_block": (transformers_skips, vllm_skips),
    "fp8_block_ue8m0": (transformers_skips, vllm_skips),
    "nvfp4_compressed_tensors": (compressed_tensors_skips,),
    "nvfp4_modelopt": (modelopt_skips,),
}


def ignored_in(settings: dict) -> list[str]:
    return settings.get("modules_to_not_convert", settings.get("ignore"))


def check_names(format: str, settings: dict, weights: dict[str, tuple[bool, int]]) -> None:
    """Readers skip each layer that is not quantized, and no other one. weights: {name: (is quantized, dims)}."""
    ignored = ignored_in(settings)
    quantized = {_layer(name) for name, (is_quantized, _) in weights.items() if is_quantized}
    for name, (is_quantized, dims) in weights.items():
        layer = _layer(name)
        # What a quantized layer has beside its weight is read with it.
        if dims > 1 and (is_quantized or layer not in quantized):
            # A Parameter that lies among quantized layers is not a layer.
            asked = layer if not any(other.startswith(layer) for other in quantized - {layer}) else name
            for skips in READERS[format]:
                assert skips(asked.removesuffix(".weight"), ignored) != is_quantized, (skips.__name__, name)


def _layer(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]
