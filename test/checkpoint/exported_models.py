"""Tiny models of transformers, and what is in the folders that they are exported to."""

from __future__ import annotations

import hashlib

import pytest
import torch
from helpers import FP8
from torchao.quantization import quantize_

from torchao_blockwise import linears_and_experts, skip_lm_head

safetensors = pytest.importorskip("safetensors.torch")

SMALL = {"vocab_size": 64, "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 48}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 320, "max_position_embeddings": 64}
_LATENT = {"q_lora_rank": 96, "kv_lora_rank": 160, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
MODELS = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 3, "intermediate_size": 256},
    "DeepseekV3": _LATENT | {"n_routed_experts": 4, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
                             "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def language_model(name: str, config=FP8, **more):
    transformers = pytest.importorskip("transformers", "5.0")
    options = SMALL | MODELS[name] | more
    if name == "DeepseekV3":
        del options["head_dim"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**options))
    if config is not None:
        quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    return model


def tensors_in(folder) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(file)
    return found


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits
