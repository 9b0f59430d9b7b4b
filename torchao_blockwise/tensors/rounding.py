"""Which random bits the gradients of a weight are rounded by: its key, and how often it was used.

A key is int64 [4], (seed, stream, use, first expert), on the weight's device. Each backward pass of a layer takes it:
it reads the key, and makes `use` one larger there, so that the host knows nothing of it and a CUDA graph may replay it.
Aliases and casts of a weight share its key, and so do its shards and what FSDP2 gathers of them; a clone goes on by its
own.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torchao_blockwise.formats import StochasticRounding, key_of

# A stream for each operand of a weight's gradients.
STREAMS_A_WEIGHT = 4
# Behind those of a model.
_FIRST_BY_HAND = 1 << 31
_made_by_hand = itertools.cycle(range(_FIRST_BY_HAND // STREAMS_A_WEIGHT))


class RoundingKeys:
    """The key of one weight, on each device on which the weight was: FSDP2 offloads shards, and gathers elsewhere.

    start: where it begins; of its place in the whole only `expert` counts.
    """

    def __init__(self, start: StochasticRounding) -> None:
        self._start = start
        self._keys: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def of_weight(cls, seed: int, index: int) -> RoundingKeys:
        """Of the Parameter with this number in its model."""
        return cls(StochasticRounding(seed, STREAMS_A_WEIGHT * index))

    @classmethod
    def by_hand(cls, seed: int) -> RoundingKeys:
        """Of a weight that is in no converted model: a stream that no other one has."""
        return cls(StochasticRounding(seed, _FIRST_BY_HAND + STREAMS_A_WEIGHT * next(_made_by_hand)))

    @classmethod
    def of(cls, weight: Any) -> RoundingKeys:
        """Those of a weight that has a key; made for one that comes from a file."""
        keys, key = weight.rounding_keys, weight.rounding_key
        if keys is None:
            seed, stream, use, expert = key.tolist()
            keys = weight.rounding_keys = cls(StochasticRounding(seed % (1 << 64), stream, use, expert=expert))
            keys._keys[key.device] = key
        return keys

    def on(self, device: torch.device) -> torch.Tensor:
        """The key that is used on `device`; of a meta device on the CPU, so that its values are not lost."""
        device = torch.device("cpu") if device.type == "meta" else device
        key = self._keys.get(device)
        if key is None:
            key = self._keys[device] = key_of(self.now(), device)
        return key

    def now(self) -> StochasticRounding:
        """Seed, stream, and how often it was used: devices are waited for."""
        uses = (int(key[2]) for key in self._keys.values())
        return self._start._replace(use=max(uses, default=self._start.use))

    def set(self, start: StochasticRounding) -> None:
        """Go on from there, on all devices, in place."""
        self._start = start
        for device, key in self._keys.items():
            key.copy_(key_of(start, device))

    def attach(self, weight: Any) -> None:
        """Be the key of `weight`."""
        weight.rounding_keys, weight.rounding_key = self, self.on(weight.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RoundingKeys:
        # On the devices, which are not waited for.
        copied = RoundingKeys(self._start)
        copied._keys = {device: key.clone() for device, key in self._keys.items()}
        return copied


def carry_key(weight: Any, other: Any, *, copied: bool = False) -> None:
    """Let `other`, made of `weight`, have its key, or with `copied` a new one that begins where that is."""
    key, keys = weight.rounding_key, weight.rounding_keys
    if key is None:
        return
    if keys is None and type(key) is torch.Tensor:
        keys = RoundingKeys.of(weight)
    if keys is not None:
        (keys.__deepcopy__({}) if copied else keys).attach(other)
    else:
        # Traced weights have only the key.
        other.rounding_key = key.clone() if copied else key
