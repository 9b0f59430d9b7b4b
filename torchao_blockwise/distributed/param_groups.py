"""Parameter groups: what an optimizer is given, in one form, and in words that ranks can compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise.tensors import QuantizedTensor

# Keys of a group that are no options.
PARAMETERS = ("params", "param_names")


def quantized_of(p: torch.Tensor) -> QuantizedTensor | None:
    """What this rank holds of a parameter that is quantised itself, sharded or not; None of another."""
    return local if isinstance(local := _compat.local_of(p), QuantizedTensor) else None


def as_groups(params: Iterable, what: str) -> list[dict[str, Any]]:
    """New groups with lists of parameters, without the quantised ones that are frozen.

    params: parameters, (name, parameter), or groups of either. what: who asks, for messages.
    Raises TypeError for a lone tensor, ValueError for nothing.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"{what}: params must be parameters or groups in a list, got a tensor; put it in a list")
    params = list(params)
    if not params:
        raise ValueError(f"{what}: there are no parameters; pass the model that will train")
    groups = [dict(group) for group in params] if isinstance(params[0], dict) else [{"params": params}]
    for group in groups:
        items = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        named = [item if isinstance(item, tuple) else (None, item) for item in items]
        kept = [(name, p) for name, p in named if quantized_of(p) is None or p.requires_grad]
        group["params"] = [p for _, p in kept]
        if any(name is not None for name, _ in named):
            group["param_names"] = [name for name, _ in kept]
    return groups


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def described_options(group: dict[str, Any]) -> str:
    """Options in words; a tensor's value is left on its device."""
    plain = {key: value for key, value in options_of(group).items() if not isinstance(value, torch.Tensor)}
    return ", ".join(f"{key}={value}" for key, value in sorted(plain.items())) or "no options"


def described_parameter(p: torch.Tensor) -> str:
    quantized = quantized_of(p)
    kind = type(p).__name__ if quantized is None else f"{quantized.fmt.name}, {quantized.config}"
    return f"{kind}, {list(p.shape)} {p.dtype}" + ", frozen" * (not p.requires_grad)
