"""The high-precision values of a quantized weight that its optimizer is yet to take for its master.

A weight that trains has them from its conversion, or from a load. Where no optimizer comes they are freed by the first
GEMM with the weight: only a quantized weight was asked for. Once an optimizer has taken them, values that are
copied into the weight are kept until it has taken those too.
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
    """The pending values of one weight; the weight's aliases share it.

    hp: [.., N, K], or None where the values were taken or freed, or only quantized ones are known.
    changed: values were copied into the weight after an optimizer took the last ones.
    awaits_cast: the payload is not of these values yet; only of a shard, which all ranks quantize together.
    """

    def __init__(self, hp: torch.Tensor | None = None):
        self.hp = hp
        self.changed = False
        self.awaits_cast = False
        self._master_of: weakref.WeakMethod[MasterOf] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingMaster:
        """A copy of the weight belongs to no optimizer."""
        return PendingMaster(copy.deepcopy(self.hp, memo))

    @property
    def is_owned(self) -> bool:
        return self._master_of is not None and self._master_of() is not None

    def take(self, master_of: MasterOf) -> torch.Tensor | None:
        """The values, for the optimizer that owns the master of the weight as long as it lives.

        master_of: a method that gives the whole master of a weight, or None where it has none.
        """
        hp, self.changed = self.hp, False
        if not self.awaits_cast:
            self.hp = None
        self._master_of = weakref.WeakMethod(master_of)
        return hp

    def free(self) -> None:
        """Called where the weight is used: no optimizer has taken its values, so none will."""
        if not self.is_owned:
            self.hp = None

    def note_copy(self, hp: torch.Tensor | None, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Called where the weight is about to take the values `hp`, or, where None, quantized ones.

        pairs: each of its inner tensors and what is copied into it.
        """
        if hp is not None:
            self.hp = getattr(hp, "hp", hp).detach().clone()
            self.changed = True
        elif not all(same_bits(mine, theirs) for mine, theirs in pairs):
            # A checkpoint's payload may also come after the masters that it was made of, and leaves them.
            self.hp = None
            self.changed = True

    def cast_is_done(self) -> None:
        """Called where the payload of a shard has been made of the values, or of the optimizer's master."""
        self.awaits_cast = False
        if not (self.is_owned and self.changed):
            self.hp = None

    def moved(self, device: torch.device | None) -> PendingMaster:
        """Of the same values on another device."""
        other = PendingMaster(None if self.hp is None else self.hp.to(device))
        other.changed, other.awaits_cast, other._master_of = self.changed, self.awaits_cast, self._master_of
        return other

    def master(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The whole master of `weight`, if an optimizer of this process has it."""
        master_of = None if self._master_of is None else self._master_of()
        return None if master_of is None else master_of(weight)
