"""How transformers and engines decide, by the names in config.json, which layers of files are quantized.

The rules of engines are written down here; compressed-tensors' own function is asked too, if it is installed.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from torch import nn

from torchao_blockwise.checkpoint.engine_layers import FUSED_BY_ENGINES
from torchao_blockwise.checkpoint.stored_weights import StoredWeights

_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")
# (layer, names in config.json, all layers of the files) -> whether the layer is read in high precision.
Skips = Callable[[str, list[str], set[str]], bool]


def transformers_skips(layer: str, ignored: list[str], layers: set[str]) -> bool:
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    return not utils.should_convert_module(layer, ignored)


def vllm_skips(layer: str, ignored: list[str], layers: set[str]) -> bool:
    """`is_layer_skipped` of vLLM 0.33, which is asked about fused layers and modules of experts."""
    layer, members = _as_engines_build_it(layer, layers)
    if members:
        return layer in ignored or _all_or_none(member in ignored for member in members)
    if "experts" in layer:
        return any(layer in name for name in ignored if "experts" in name)
    return layer in ignored


def modelopt_skips(layer: str, ignored: list[str], layers: set[str]) -> bool:
    """`is_layer_excluded` of vLLM 0.33: exact names, what contains them, and wildcards."""
    built, _ = _as_engines_build_it(layer, layers)
    return vllm_skips(layer, ignored, layers) or any(name in built or fnmatch(built, name) for name in ignored)


def compressed_tensors_skips(layer: str, ignored: list[str], layers: set[str]) -> bool:
    """`match_name` of compressed-tensors 0.20."""
    return any(
        re.match(name.removeprefix("re:"), layer) is not None if name.startswith("re:") else layer == name
        for name in ignored
    )


def vllm_skips_compressed(layer: str, ignored: list[str], layers: set[str]) -> bool:
    """`should_ignore_layer` of vLLM 0.33, which is asked about fused layers and single experts."""
    built, members = (layer, []) if _EXPERTS.match(layer) else _fused(layer, layers)
    if members and not compressed_tensors_skips(built, ignored, layers):
        return _all_or_none(compressed_tensors_skips(member, ignored, layers) for member in members)
    return compressed_tensors_skips(built, ignored, layers)


def _as_engines_build_it(layer: str, layers: set[str]) -> tuple[str, list[str]]:
    """(the layer that engines run it in, its members where it is fused). Only members that files have are built."""
    if match := _EXPERTS.match(layer):
        return match[1], []
    return _fused(layer, layers)


def _fused(layer: str, layers: set[str]) -> tuple[str, list[str]]:
    path, dot, last = layer.rpartition(".")
    row = next((row for row in FUSED_BY_ENGINES if last in row), ())
    if not row:
        return layer, []
    members = [f"{path}{dot}{part}" for part in row]
    # Each model has its own name for it.
    return f"{path}{dot}fused", [member for member in members if member in layers or member == layer]


def _all_or_none(skipped: Iterator[bool]) -> bool:
    (answer,) = set(skipped)
    return answer


_OF_FP8 = (transformers_skips, vllm_skips)
READERS: dict[str, tuple[Skips, ...]] = {
    "fp8_block": _OF_FP8,
    "fp8_block_ue8m0": _OF_FP8,
    "nvfp4_compressed_tensors": (compressed_tensors_skips, vllm_skips_compressed),
    "nvfp4_modelopt": (modelopt_skips,),
}
if importlib.util.find_spec("compressed_tensors") is not None:
    from compressed_tensors.utils.match import is_match

    def compressed_tensors_itself(layer: str, ignored: list[str], layers: set[str]) -> bool:
        """Its own function, of which the rule above is a copy."""
        return not is_match(layer, nn.Linear(1, 1), ["Linear"], ignored)

    READERS["nvfp4_compressed_tensors"] += (compressed_tensors_itself,)


def ignored_in(settings: dict) -> list[str]:
    return settings.get("modules_to_not_convert", settings.get("ignore"))


def check_names(format: str, settings: dict, weights: dict[str, tuple[bool, int]]) -> None:
    """Readers skip each layer that is not quantized, and no other one. weights: {name: (is quantized, dims)}."""
    ignored, layers = ignored_in(settings), {_layer(name) for name in weights}
    for name, layer, is_quantized in asked(weights):
        for skips in READERS[format]:
            assert skips(layer, ignored, layers) != is_quantized, (skips.__name__, name)


def check_folder(folder: Path, format: str) -> dict[bool, int]:
    """Readers decide rightly about every tensor that lies there. Returns how many are quantized and not."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    files = StoredWeights(folder)
    weights = {name: (files.format(name) is not None, len(files.shape(name))) for name in files.names}
    check_names(format, settings, weights)
    kinds = [is_quantized for is_quantized, dims in weights.values() if dims > 1]
    return {kind: kinds.count(kind) for kind in (True, False)}


def asked(weights: dict[str, tuple[bool, int]]) -> Iterator[tuple[str, str, bool]]:
    """(name of a tensor, the layer that readers ask about, whether it is quantized)."""
    quantized = {_layer(name) for name, (is_quantized, _) in weights.items() if is_quantized}
    for name, (is_quantized, dims) in weights.items():
        layer = _layer(name)
        # Other tensors of a quantized layer are read with its weight.
        if dims > 1 and (is_quantized or layer not in quantized):
            # A Parameter that lies among quantized layers is not a layer.
            is_layer = not any(other.startswith(layer) for other in quantized - {layer})
            yield name, (layer if is_layer else name).removesuffix(".weight"), is_quantized


def _layer(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]
