"""What files say is not quantized: transformers and engines find it by name, and quantize nothing else of it."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import FP8, NVFP4, mlp
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, is_linear, keep_last_blocks, linears_and_experts, skip_fqns, skip_lm_head
from torchao_blockwise.checkpoint.plain_layers import plain_layers
from torchao_blockwise.tensors import MasterWeightTensor

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

from exported_models import MODELS, language_model

pytestmark = pytest.mark.usefixtures("no_interpreter")
MIXTURES = ("Qwen3Moe", "Mixtral", "DeepseekV3")
# Of the second layer's experts: what the files call their module, and what transformers does.
EXPERTS = {
    "Qwen3Moe": ["model.layers.1.mlp.experts"],
    "Mixtral": ["model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts"],
    "DeepseekV3": ["model.layers.1.mlp.experts"],
}


def partly(name: str, config, *more):
    """All but the last block is converted."""
    model = language_model(name, None)
    chosen = linears_and_experts() & skip_lm_head() & keep_last_blocks(model, 1)
    quantize_(model, config, filter_fn=chosen if not more else chosen & more[0])
    return model


def settings(model, folder, format="fp8_block") -> dict:
    with warnings.catch_warnings():
        # Of tensor scales.
        warnings.filterwarnings("ignore", message=".*quantized anew.*")
        checkpoint.export(model, folder, format)
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def is_skipped_by_vllm(prefix: str, ignored: list[str]) -> bool:
    """As quant_utils.is_layer_skipped of vLLM 0.33 does for layers that are not joined, and for experts."""
    if "experts" in prefix and not prefix.endswith("_proj"):
        return any(prefix in name for name in ignored if "experts" in name)
    return prefix in ignored


@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_not_converted_is_named(name, tmp_path):
    """As transformers looks for it, and for names of files as vLLM does."""
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    model = partly(name, FP8)
    ignored = settings(model, tmp_path / "out")["modules_to_not_convert"]
    kinds = {True: 0, False: 0}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear) or any(p.dim() == 3 for p in own.values()):
            is_converted = any(isinstance(p, MasterWeightTensor) for p in own.values())
            assert utils.should_convert_module(path, ignored) == is_converted, path
            assert is_skipped_by_vllm(path, ignored) != is_converted, path
            kinds[is_converted] += 1
    assert min(kinds.values()) > 3
    if name in MIXTURES:
        assert [n for n in ignored if n.endswith("experts") and "shared" not in n] == EXPERTS[name]
        assert plain_layers(model).experts == EXPERTS[name]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_compressed_tensors_passes_over(name, tmp_path):
    """It is asked for single experts, under names of files."""
    ignored = settings(partly(name, NVFP4), tmp_path / "out", "nvfp4_compressed_tensors")["ignore"]
    patterns = [n.removeprefix("re:") for n in ignored if n.startswith("re:")]
    assert len(patterns) == len(EXPERTS[name])
    asked = f"{EXPERTS[name][0]}.0.gate_proj"
    assert any(re.match(pattern, asked) for pattern in patterns)
    assert not any(re.match(pattern, asked.replace("layers.1", "layers.0")) for pattern in patterns)
    assert not any(re.match(pattern, asked.replace("layers.1", "layers.11")) for pattern in patterns)


def test_where_engines_want_all_or_nothing_a_warning_says_so(tmp_path):
    model = partly("Qwen3Moe", FP8, skip_fqns("*.0.self_attn.k_proj"))
    with pytest.warns(UserWarning, match=r"run model.*\.q_proj\+k_proj\+v_proj as one and want all"):
        settings(model, tmp_path / "out")
    model = partly("Qwen3Moe", FP8)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.hp.detach())
    with pytest.warns(UserWarning, match=r"run model\.layers\.0\.mlp\.experts as one"):
        settings(model, tmp_path / "again")


def test_whole_models_warn_of_nothing(tmp_path):
    model = language_model("Qwen3Moe", None)
    quantize_(model, FP8, filter_fn=is_linear() & skip_lm_head())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = settings(model, tmp_path / "out")["modules_to_not_convert"]
    assert names == ["lm_head", "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_convolutions_are_no_experts():
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 3), "mlp": mlp(FP8)})
    assert plain_layers(model) == ([], [])
    assert torch.is_tensor(model["conv"].weight)
