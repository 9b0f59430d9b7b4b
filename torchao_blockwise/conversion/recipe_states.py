"""The state of a recipe that a run needs to resume: how often each weight's random bits were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.formats import StochasticRounding
from torchao_blockwise.tensors.rounding import RoundingKeys

_NUMBERS = "seed", "stream", "use"


def recipe_state(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the state of `model` that continues the same random bits; a checkpoint needs it with the state dict.

    Returns for each weight whose gradients are rounded stochastically, by name: the seed and the stream of its random
    bits, and how often they were drawn. Plain integers, empty for other recipes. Each data-parallel rank has a separate
    state, as it has a separate seed. Waits for the device.
    """
    return {name: dict(zip(_NUMBERS, (int(number) for number in keys.now()[:3]))) for name, keys, _ in _rounding(model)}


def load_recipe_state(model: nn.Module, state: Mapping[str, Mapping[str, int]]) -> None:
    """Let `model` go on where the model was whose `recipe_state` this is; the inverse of it, all or nothing.

    Raises KeyError for weights that are only in one of them, ValueError for numbers that no stream has.
    """
    found = {name: (keys, expert) for name, keys, expert in _rounding(model)}
    for name in state.keys() - found.keys():
        raise KeyError(
            f"load_recipe_state: the model rounds no gradients of {name!r} stochastically{did_you_mean(name, found)}"
        )
    for name in found.keys() - state.keys():
        raise KeyError(
            f"load_recipe_state: the state has nothing of {name!r}, whose gradients the model rounds stochastically; "
            "give the recipe_state of a model that was converted alike"
        )
    starts = []
    for name, (keys, expert) in found.items():
        try:
            seed, stream, use = (state[name][number] for number in _NUMBERS)
            starts.append((keys, RoundingKeys(StochasticRounding(seed, stream, use, expert=expert)).checked()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_recipe_state: {name!r} must have the integers {', '.join(_NUMBERS)}, got {state[name]!r}; "
                f"give what recipe_state returned ({error})"
            ) from None
    for keys, start in starts:
        keys.set(start)


def _rounding(model: nn.Module) -> Iterator[tuple[str, RoundingKeys, int]]:
    """(name, keys, first expert) of each weight that has random bits."""
    for name, parameter in model.named_parameters():
        weight: Any = _compat.local_of(parameter)
        if getattr(weight, "rounding_key", None) is not None:
            keys = RoundingKeys.of(weight)
            yield name, keys, keys.now().expert
