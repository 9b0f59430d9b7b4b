"""The state of stochastic rounding that a run needs to resume: how often each weight's random bits were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.formats import StochasticRounding, key_of
from torchao_blockwise.tensors.rounding import RoundingKeys

_NUMBERS = "seed", "stream", "use"


def recipe_state(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the state of the random bits of `model`, to be saved in a checkpoint next to the state dict.

    Returns {name: {"seed", "stream", "use"}} for each weight whose gradients are rounded stochastically: seed and
    stream of its random bits, and how often they were drawn, as plain integers. Empty for other recipes. Each
    data-parallel rank has a separate seed and so a separate state. Synchronizes with the device.
    """
    return {name: dict(zip(_NUMBERS, (int(number) for number in keys.now()[:3]))) for name, keys, _ in _rounding(model)}


def load_recipe_state(model: nn.Module, state: Mapping[str, Mapping[str, int]]) -> None:
    """Restore the state of random bits that `recipe_state` returned; nothing changes if an error is raised.

    Raises KeyError for weights that only the state or only the model has, ValueError for invalid numbers.
    """
    found = {name: (keys, expert) for name, keys, expert in _rounding(model)}
    for name in state.keys() - found.keys():
        raise KeyError(
            f"load_recipe_state: the model rounds no gradients of {name!r} stochastically{did_you_mean(name, found)}"
        )
    for name in found.keys() - state.keys():
        raise KeyError(
            f"load_recipe_state: the state has no {name!r}, whose gradients the model rounds stochastically; use the "
            "recipe_state of a model that was converted in the same way"
        )
    starts = []
    for name, (keys, expert) in found.items():
        try:
            seed, stream, use = (state[name][number] for number in _NUMBERS)
            start = StochasticRounding(seed, stream, use, expert=expert)
            # Raises for numbers of too many bits.
            key_of(start, torch.device("cpu"))
            starts.append((keys, start))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_recipe_state: {name!r} must have the integers {', '.join(_NUMBERS)}, got {state[name]!r}; "
                f"pass the result of recipe_state ({error})"
            ) from None
    for keys, start in starts:
        keys.set(start)


def _rounding(model: nn.Module) -> Iterator[tuple[str, RoundingKeys, int]]:
    """Yield (name, keys, first expert) for each weight that has random bits."""
    for name, parameter in model.named_parameters():
        weight: Any = _compat.local_of(parameter)
        if getattr(weight, "rounding_key", None) is not None:
            keys = RoundingKeys.of(weight)
            yield name, keys, keys.now().expert
