"""The key of the random bits with which the gradients of a weight are rounded.

A key is int64 [4], (seed, stream, use, first expert), on the weight's device. Each backward pass of a layer reads the
key and increments `use` on the device, so the host is not involved and a CUDA graph can replay it. Aliases, casts and
shards of a weight, and the weights that FSDP2 gathers, share its key. A clone gets a copy.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torchao_blockwise.formats import StochasticRounding, key_of

# A stream for each operand of a weight's gradients.
STREAMS_A_WEIGHT = 4
# The streams of weights outside of converted models.
streams_by_hand = itertools.cycle(range(1 << 31, 1 << 32, STREAMS_A_WEIGHT))


class RoundingKeys:
    """The key of one weight on each device where it has been: FSDP2 offloads shards to one and gathers on another.

    start: the initial state; of its position in a larger tensor, only `expert` is used.
    """

    def __init__(self, start: StochasticRounding) -> None:
        self._start = start
        self._keys: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def of(cls, weight: Any) -> RoundingKeys:
        """Return the keys of a weight that has a key; create them if the weight was loaded from a file."""
        keys, key = weight.rounding_keys, weight.rounding_key
        if keys is None:
            seed, stream, use, expert = key.tolist()
            keys = weight.rounding_keys = cls(StochasticRounding(seed % (1 << 64), stream, use, expert=expert))
            keys._keys[key.device] = key
        return keys

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the key for `device`; for a meta device a key on the CPU, so that its values are not lost."""
        device = torch.device("cpu") if device.type == "meta" else device
        key = self._keys.get(device)
        if key is None:
            key = self._keys[device] = key_of(self.now(), device)
        return key

    def now(self) -> StochasticRounding:
        """Return seed, stream and the number of uses; synchronizes with the devices."""
        uses = (int(key[2]) for key in self._keys.values())
        return self._start._replace(use=max(uses, default=self._start.use))

    def set(self, start: StochasticRounding) -> None:
        """Set the state on all devices, in place."""
        self._start = start
        for device, key in self._keys.items():
            key.copy_(key_of(start, device))

    def attach(self, weight: Any) -> None:
        """Make this the key of `weight`."""
        weight.rounding_keys, weight.rounding_key = self, self.on(weight.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RoundingKeys:
        # Copy on the devices, without synchronization.
        copied = RoundingKeys(self._start)
        copied._keys = {device: key.clone() for device, key in self._keys.items()}
        return copied


def carry_key(weight: Any, other: Any, *, copied: bool = False) -> None:
    """Give `other`, which was derived from `weight`, the same key, or with `copied` a copy of its current state."""
    key, keys = weight.rounding_key, weight.rounding_keys
    if key is None:
        return
    if keys is None and type(key) is torch.Tensor:
        keys = RoundingKeys.of(weight)
    if keys is not None:
        (keys.__deepcopy__({}) if copied else keys).attach(other)
    else:
        # Traced weights have only the tensor.
        other.rounding_key = key.clone() if copied else key
