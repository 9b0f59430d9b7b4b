"""The state of stochastic rounding that a run needs to resume: how many times each weight's random bits were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.formats import key_of
from torchao_blockwise.tensors.rounding import Keys, keys_of, state_of

_NUMBERS = "seed", "stream", "use"


def recipe_state(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the state of the random bits of `model`; save it in checkpoints together with the state dict.

    Returns {name: {"seed", "stream", "use"}} for each weight whose gradients are rounded stochastically: the seed and
    stream of its random bits, and how many times they were used, as plain integers. Empty for other recipes. Each
    data-parallel rank has a different seed, so each must save its own state. Synchronizes with the device.
    """
    return {name: dict(zip(_NUMBERS, map(int, state_of(keys)[:3]))) for name, keys in _keys(model)}


def load_recipe_state(model: nn.Module, state: Mapping[str, Mapping[str, int]]) -> None:
    """Restore the state of random bits that `recipe_state` returned. If an error is raised, nothing is changed.

    Raises TypeError for a state that is not a mapping, KeyError for weights that are only in the state or only in the
    model, ValueError for invalid numbers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_recipe_state: state must be a mapping that recipe_state returned, got {state!r:.40}; a checkpoint "
            "saved without it cannot continue its random bits"
        )
    found = dict(_keys(model))
    for name in state.keys() - found.keys():
        raise KeyError(
            f"load_recipe_state: the state has {name!r}, but the model has no such weight whose gradients are rounded "
            f"stochastically{did_you_mean(name, found)}"
        )
    for name in found.keys() - state.keys():
        raise KeyError(
            f"load_recipe_state: {name!r} is missing from the state, but the model rounds its gradients "
            "stochastically; use the recipe_state of a model that was converted in the same way"
        )
    restored = []
    for name, keys in found.items():
        try:
            seed, stream, use = (state[name][number] for number in _NUMBERS)
            start = state_of(keys)._replace(seed=seed, stream=stream, use=use)
            # Raises if a number has too many bits.
            restored += [(key, key_of(start, device)) for device, key in keys.items()]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_recipe_state: {name!r} must have the integers {', '.join(_NUMBERS)}, got {state[name]!r}; "
                f"pass the result of recipe_state ({error})"
            ) from None
    for key, value in restored:
        key.copy_(value)


def _keys(model: nn.Module) -> Iterator[tuple[str, Keys]]:
    """Yield (name, keys) for each weight that has random bits."""
    for name, parameter in model.named_parameters():
        weight: Any = _compat.local_of(parameter)
        if getattr(weight, "rounding_key", None) is not None:
            yield name, keys_of(weight)
