"""The key of the random bits with which the gradients of a weight are rounded.

A key is int64 [4], (seed, stream, use, first expert), on the weight's device. Each backward pass of a layer reads the
key and increments `use` on the device, so the host is not involved and a CUDA graph can replay it. Aliases, casts and
shards of a weight, and the weights that FSDP2 gathers, share its key. A clone gets a copy.

A weight has a key on each device where it has been: FSDP2 offloads shards to one and gathers on another.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import torch

from torchao_blockwise.formats import StochasticRounding, key_of

Keys: TypeAlias = dict[torch.device, torch.Tensor]

# A stream for each operand of a weight's gradients.
STREAMS_A_WEIGHT = 4
# The streams of weights outside of converted models.
streams_by_hand = itertools.cycle(range(1 << 31, 1 << 32, STREAMS_A_WEIGHT))


def start_key(weight: Any, start: StochasticRounding) -> None:
    """Give `weight` a new key in this state; of its position in a larger tensor, only `expert` is used."""
    device = _device_of(weight)
    weight.rounding_keys = {device: key_of(start, device)}
    weight.rounding_key = weight.rounding_keys[device]


def keys_of(weight: Any) -> Keys:
    """Return the keys of a weight that has one."""
    if weight.rounding_keys is None:
        # Loaded from a file.
        weight.rounding_keys = {weight.rounding_key.device: weight.rounding_key}
    return weight.rounding_keys


def state_of(keys: Keys) -> StochasticRounding:
    """Return seed, stream, the number of uses and the first expert; synchronizes with the devices."""
    seed, stream, use, expert = max((key.tolist() for key in keys.values()), key=lambda state: state[2])
    return StochasticRounding(seed % (1 << 64), stream, use, expert=expert)


def carry_key(weight: Any, other: Any, *, copied: bool = False) -> None:
    """Give `other`, which was derived from `weight`, the same key, or with `copied` a copy of its current state."""
    key = weight.rounding_key
    if key is None:
        return
    if type(key) is not torch.Tensor:
        # Traced weights have only the tensor.
        other.rounding_key = key.clone() if copied else key
        return
    keys, device = keys_of(weight), _device_of(other)
    keys = {device: key.clone() for device, key in keys.items()} if copied else keys
    if device not in keys:
        keys[device] = key_of(state_of(keys), device)
    other.rounding_keys, other.rounding_key = keys, keys[device]


def _device_of(weight: Any) -> torch.device:
    """Return the device of the key: that of `weight`, or for a meta tensor the CPU, so that the state is not lost."""
    return torch.device("cpu") if weight.is_meta else weight.device
