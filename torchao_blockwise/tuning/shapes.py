"""The linear layers of well-known models, as (out_features, in_features) = (N, K) of their weights.

Source: the models' published configurations, config.json on their pages; DeepSeek-V3 16B is DeepSeek-V2-Lite's.
"""

from __future__ import annotations

# DeepSeek's attention projects to low-rank latents first (kv_a, q_a) and from them to heads (kv_b, q_b).
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "deepseek_v3_16b": {
        "attention.q": (3072, 2048),
        "attention.kv_a": (576, 2048),
        "attention.kv_b": (4096, 512),
        "attention.output": (2048, 2048),
        "mlp.gate": (10944, 2048),
        "mlp.down": (2048, 10944),
        "shared_experts.gate": (2816, 2048),
        "shared_experts.down": (2048, 2816),
        "expert.gate": (1408, 2048),
        "expert.down": (2048, 1408),
    },
    "deepseek_v3_671b": {
        "attention.q_a": (1536, 7168),
        "attention.q_b": (24576, 1536),
        "attention.kv_a": (576, 7168),
        "attention.kv_b": (32768, 512),
        "attention.output": (7168, 16384),
        "mlp.gate": (18432, 7168),
        "mlp.down": (7168, 18432),
        "expert.gate": (2048, 7168),
        "expert.gate_up": (4096, 7168),
        "expert.down": (7168, 2048),
    },
    "llama_8b": {
        "attention.q": (4096, 4096),
        "attention.k": (1024, 4096),
        "mlp.gate": (14336, 4096),
        "mlp.down": (4096, 14336),
    },
    "llama_70b": {
        "attention.q": (8192, 8192),
        "attention.k": (1024, 8192),
        "mlp.gate": (28672, 8192),
        "mlp.down": (8192, 28672),
    },
}


def features_of(models: list[str] | None = None) -> list[tuple[int, int]]:
    """(N, K) of every layer of these models, all by default, each once."""
    return list(dict.fromkeys(shape for model in models or LAYERS for shape in LAYERS[model].values()))
