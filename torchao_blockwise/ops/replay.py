"""Replaying an operation: the second time that shapes come is recorded, and every later one does only what was seen.

What an operation does depends on its arguments' shapes, strides, dtypes, devices and options, and on no value: checks,
the choice of a backend, of tiles and of a grid come out the same. So the second call of a kind is recorded: tensors
that it allocates, PyTorch operations, launches. Later calls allocate and launch, at the new addresses, which takes the
host a third of the time. Shapes that come once, as token counts may, are not recorded.

    signature   of each tensor shape, strides, dtype, device, and whether it starts on 16 bytes; the other arguments
    recording   allocations and views, all other PyTorch operations, launches (recording.py)
    replay      the same in the same order; a tensor is freed after what used it last

What cannot be replayed is called each time as before: what reads values on the host, makes shapes of them, takes a
tensor from elsewhere, or calls another library's operations (collectives). What autocast makes of an operation's own
PyTorch operations is left out: bits do not depend on it. On CUDA devices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchao_blockwise.formats import BlockFormat, CastOptions
from torchao_blockwise.ops.backend import Backend, first_tensor
from torchao_blockwise.ops.recording import ALIGNMENT_MASK, NOT_BUILT, Recording, record

# Of one operation. Where shapes never come again, what is remembered must not grow without end.
_MAX_SIGNATURES = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SETTLED: set[type] = {type(None), bool, int, float, str, torch.dtype, torch.Size, Backend, BlockFormat, CastOptions}
_SEEN, _NEVER = "seen", "never"


def serves(device: torch.device) -> bool:
    """Whether operations on `device` are replayed: on a CPU nothing is launched."""
    return device.type == "cuda"


def on_device(*args: Any) -> bool:
    """Whether the first tensor of these arguments lies where operations are replayed."""
    x = first_tensor(args)
    return x is not None and serves(x.device)


def signature(args: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """(what decides what a function of these arguments does, their tensors); None where that is not known.

    Arguments are plain tensors, what is settled by its equality, and tuples and lists of these. Written out for what is
    in operands, not by a call for each: every operation comes here.
    """
    key: list[Any] = []
    tensors: list[torch.Tensor] = []
    for arg in args:
        if type(arg) in _PLAIN:
            tensors.append(arg)
            key += (arg.shape, arg.stride(), arg.dtype, arg.get_device(), arg.data_ptr() & ALIGNMENT_MASK)
        elif type(arg) in _SETTLED:
            key.append(arg)
        elif isinstance(arg, (tuple, list)):
            key.append(len(arg))
            for x in arg:
                if type(x) in _PLAIN:
                    tensors.append(x)
                    key += (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & ALIGNMENT_MASK)
                elif type(x) in _SETTLED:
                    key.append(x)
                elif (inner := signature((x,))) is not None:
                    key += inner[0]
                    tensors += inner[1]
                else:
                    return None
        else:
            return None
    return tuple(key), tensors


def settle(*kinds: type) -> None:
    """Arguments of these types decide by their equality what an operation does."""
    _SETTLED.update(kinds)


class Replays:
    """The recordings of one function, by signature.

    empties_lists: whether it takes what is in lists among its arguments out of them, so that it can go when it was
        used; a replay does the same.
    """

    def __init__(self, empties_lists: bool = False) -> None:
        self._empties_lists = empties_lists
        self._known: dict[tuple[Any, ...], Any] = {}
        _all.append(self)

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """`function(*args)`, by its recording where there is one that fits now."""
        what, given = self.find(function, args)
        return what(*given)

    def find(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """(what to call, its arguments): the program of a recording, else `function` or what records it."""
        signed = signature(args)
        if signed is None:
            return function, args
        key, tensors = signed
        known = self._known.get(key)
        if type(known) is Recording:
            program = known.replayed()
            if program is not None:
                if self._empties_lists:
                    for arg in args:
                        if type(arg) is list:
                            arg.clear()
                return program, (tensors,)
        elif known is _SEEN or known is NOT_BUILT:
            return self._record, (key, function, args)
        elif known is None:
            if len(self._known) >= _MAX_SIGNATURES:
                self._known.clear()
            self._known[key] = _SEEN
        return function, args

    def _record(self, key: tuple[Any, ...], function: Callable[..., Any], args: Sequence[Any]) -> Any:
        result, recorded = record(function, args)
        self._known[key] = _NEVER if isinstance(recorded, str) and recorded != NOT_BUILT else recorded
        return result

    def forget(self) -> None:
        self._known.clear()


_all: list[Replays] = []


def forget() -> None:
    """Forget all recordings: for when something else changes that decides what operations do."""
    for replays in _all:
        replays.forget()
