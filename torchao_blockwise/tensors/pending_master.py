"""The high-precision values of a quantized weight that an optimizer has not yet taken for its master weight.

A weight that trains has them after its conversion, or after loading. If no optimizer takes them, the first GEMM with
the weight frees them. Once an optimizer has taken them, values that are copied into the weight are kept until the
optimizer takes them as well.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchao_blockwise.tensors.state_values import same_bits

MasterOf = Callable[[torch.Tensor], torch.Tensor | None]


class PendingMaster:
    """The pending values of one weight; the weight's aliases share this object.

    hp: [.., N, K], or None if the values were taken or freed, or if only quantized ones are known.
    changed: whether values were copied into the weight after an optimizer took the last ones.
    awaits_cast: whether the payload has not been computed from these values yet; only for a shard, which all ranks
        quantize together.
    """

    def __init__(self, hp: torch.Tensor | None = None):
        self.hp = hp
        self.changed = False
        self.awaits_cast = False
        self._master_of: Callable[[], MasterOf | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingMaster:
        """Copy the values, but not the optimizer: a copied weight belongs to none."""
        return PendingMaster(copy.deepcopy(self.hp, memo))

    @property
    def is_owned(self) -> bool:
        return self._master_of() is not None

    def take(self, master_of: MasterOf) -> torch.Tensor | None:
        """Return the values to the optimizer, which then owns the weight's master while it is alive.

        master_of: a method of it that returns the whole master of a weight, or None if it does not have it.
        """
        hp, self.changed = self.hp, False
        if not self.awaits_cast:
            self.hp = None
        self._master_of = weakref.WeakMethod(master_of)
        return hp

    def free(self) -> None:
        """Free the values unless an optimizer owns the weight; called when the weight is used."""
        if not self.is_owned:
            self.hp = None

    def note_copy(self, hp: torch.Tensor | None, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record that the values `hp` are copied into the weight; None if quantized ones are copied.

        pairs: (inner tensor of the weight, tensor that is copied into it).
        """
        if hp is not None:
            self.hp = getattr(hp, "hp", hp).detach().clone()
            self.changed = True
        elif not all(same_bits(mine, theirs) for mine, theirs in pairs):
            # If a checkpoint's payload is loaded after the masters from which it was computed, keep the masters.
            self.hp = None
            self.changed = True

    def cast_is_done(self) -> None:
        """Record that the payload of a shard was computed from the values, or from the optimizer's master."""
        self.awaits_cast = False
        if not (self.is_owned and self.changed):
            self.hp = None

    def moved(self, device: torch.device | None) -> PendingMaster:
        """Return the same pending values on another device."""
        other = copy.copy(self)
        other.hp = None if self.hp is None else self.hp.to(device)
        return other

    def master(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the whole master of `weight` if an optimizer of this process has it, or None."""
        master_of = self._master_of()
        return None if master_of is None else master_of(weight)
