"""The state of stochastic rounding that a run needs to resume: how many times each weight's random bits were drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.formats import key_of
from torchao_blockwise.tensors.rounding import RoundingKeys

_NUMBERS = "seed", "stream", "use"


def recipe_state(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the state of the random bits of `model`; save it in checkpoints together with the state dict.

    Returns {name: {"seed", "stream", "use"}} for each weight whose gradients are rounded stochastically: the seed and
    stream of its random bits, and how many times they were drawn, as plain integers. Empty for other recipes. Each
    data-parallel rank has a different seed, so each must save its own state. Synchronizes with the device.
    """
    return {name: dict(zip(_NUMBERS, map(int, keys.now()[:3]))) for name, keys in _keys_of(model).items()}


def load_recipe_state(model: nn.Module, state: Mapping[str, Mapping[str, int]]) -> None:
    """Restore the state of random bits that `recipe_state` returned. If an error is raised, nothing is changed.

    Raises KeyError for weights that are only in the state or only in the model, ValueError for invalid numbers.
    """
    found, starts = _keys_of(model), []
    for name in sorted(state.keys() ^ found.keys()):
        if name in found:
            why = "is missing from the state; use the recipe_state of a model that was converted in the same way"
        else:
            why = f"is in the state, but the model rounds no such weight stochastically{did_you_mean(name, found)}"
        raise KeyError(f"load_recipe_state: {name!r} {why}")
    for name, keys in found.items():
        try:
            seed, stream, use = (state[name][number] for number in _NUMBERS)
            start = keys.now()._replace(seed=seed, stream=stream, use=use)
            # Raises if a number has too many bits.
            key_of(start, torch.device("cpu"))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_recipe_state: {name!r} must have the integers {', '.join(_NUMBERS)}, got {state[name]!r}; "
                f"pass the result of recipe_state ({error})"
            ) from None
        starts.append(start)
    for keys, start in zip(found.values(), starts):
        keys.set(start)


def _keys_of(model: nn.Module) -> dict[str, RoundingKeys]:
    """Return the keys of each weight that has random bits, by name."""
    weights: dict[str, Any] = {name: _compat.local_of(p) for name, p in model.named_parameters()}
    return {name: RoundingKeys.of(w) for name, w in weights.items() if getattr(w, "rounding_key", None) is not None}
