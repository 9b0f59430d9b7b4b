"""Layers that inference engines fuse, and so run with the same tensor scale, which an export gives them."""

from __future__ import annotations

import re

# What engines concatenate, by the last parts of names.
FUSED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def scale_group_name(name: str) -> str:
    """The name that the weight `name` has in common with those that engines fuse with it; else its own.

    Experts that are modules of a list count as one weight.
    """
    name = _EXPERT.sub("experts.*.", name)
    path, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{path}.{'+'.join(names)}".lstrip(".") for names in FUSED_BY_ENGINES if last in names), name)
