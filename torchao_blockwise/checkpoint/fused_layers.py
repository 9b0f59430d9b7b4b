"""Layers that inference engines fuse, and that share one tensor scale in NVFP4: q, k and v; gate and up; experts."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Layers that vLLM fuses, by the last parts of their names in files, in its order. Of 0.33.0, read on 2026-11-26:
# `packed_modules_mapping` and the stacked weights of all its models, except convolutions and what it runs in high
# precision always (wk + weights_proj and wkv + wgate of indexers, hyper-connections).
FUSED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("query_net", "key_net", "value_net"),
    ("c_fc_0", "c_fc_1"),
    ("fc1", "fc3"),
    ("wq_a", "wkv"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    # Where some of them are missing, or another layer is beside them.
    ("q_proj", "k_proj"),
    ("k_proj", "v_proj"),
    ("key_net", "value_net"),
    ("key_proj", "value_proj"),
    ("gate_proj", "dense_h_to_4h"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "gate_proj"),
    ("q_proj", "k_proj", "v_proj", "o_gate_proj"),
    ("q_proj", "k_proj", "v_proj", "output_gate_proj"),
    ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
    ("q_proj", "k_proj", "v_proj", "index_qk_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    ("q_proj", "k_proj", "v_proj", "sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z", "g_proj"),
)
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def fused_layers(names: Iterable[str]) -> dict[str, str]:
    """{name of a weight: that of all layers which engines fuse with it; its own name where there are none}.

    names: all weights of a model, or of its files: layers are fused where all of a row of `FUSED_BY_ENGINES` are there,
    and the longest such row counts. Experts that are modules of a list count as one weight.
    """
    whole = {name: _EXPERT.sub("experts.*.", name) for name in names}
    split = {name: name.removesuffix(".weight").rpartition(".")[::2] for name in whole.values()}
    layers: dict[str, set[str]] = {}
    for path, last in split.values():
        layers.setdefault(path, set()).add(last)
    fused: dict[str, str] = {}
    for name, (path, last) in split.items():
        rows = (row for row in FUSED_BY_ENGINES if last in row and layers[path].issuperset(row))
        row = max(rows, key=len, default=())
        fused[name] = f"{path}.{'+'.join(row)}".lstrip(".") if row else name
    return {name: fused[of_all] for name, of_all in whole.items()}
