"""Who sees the tensors that layers quantize: nobody, or an observer such as the numerics monitor.

A layer tells an observer of each activation and the weight that it is multiplied by, in a forward pass, and of the
gradient in backward. Where nobody looks that is one question a pass. `multiplied_weights` records which weights these
are, for the check of a module's forward pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from torchao_blockwise.tensors.reads import key_of

if TYPE_CHECKING:
    from torchao_blockwise.nn.gemms import GemmSpec

# What takes the gradient of a layer's output [T, N]; called once in the backward of the pass that it was made in.
SeesGradient: TypeAlias = Callable[[torch.Tensor], None]


class Observer(Protocol):
    """What `observe` takes."""

    def __call__(self, weight: Any, x: torch.Tensor, spec: GemmSpec) -> SeesGradient | None:
        """x: [T, K] as it is quantized for the product with `weight`, by `spec`."""


_observer: Observer | None = None


def observe(observer: Observer | None) -> Observer | None:
    """Let `observer` see what layers quantize from now on, in eager mode, or nobody; returns who saw it before."""
    global _observer
    before, _observer = _observer, observer
    return before


def observe_gemm(weight: Any, values: Callable[[], torch.Tensor], spec: GemmSpec) -> SeesGradient | None:
    """Tell the observer of a GEMM with `weight`, whose activation `values` computes in high precision, [T, K].

    Returns what is to see the gradient, None where nobody observes.
    """
    if torch.compiler.is_compiling():
        _note_traced()
        return None
    if _multiplied.records:
        note_multiplied(weight)
    else:
        _multiplied.traced += 1
    if _observer is None:
        return None
    with torch.no_grad():
        return _observer(weight, values().detach(), spec)


class _Multiplied(threading.local):
    """records: of each forward pass of this thread that is being checked, the weights that it multiplied by.

    traced: how many GEMMs were traced, or ran.
    """

    def __init__(self) -> None:
        self.records: list[set[Any]] = []
        self.traced = 0


_multiplied = _Multiplied()


@contextlib.contextmanager
def multiplied_weights() -> Iterator[Callable[[Any], bool]]:
    """Record the weights of low-precision GEMMs; gives (weight) -> whether one ran with it, or with a form of it."""
    record: set[Any] = set()
    _multiplied.records.append(record)
    try:
        yield lambda weight: not record.isdisjoint((*_keys(weight), None))
    finally:
        _multiplied.records.pop()


def note_multiplied(weight: Any) -> None:
    """Record a GEMM with `weight`; None where a compiled graph runs one, which does not know whose values they are."""
    _multiplied.traced += 1
    for record in _multiplied.records:
        record.update(_keys(weight))


def _keys(weight: Any) -> list[Any]:
    """Keys that a weight shares with its casts, views and multiples: its own, and the values that casts read."""
    if weight is None:
        return [None]
    hp = getattr(weight, "hp", None)
    return [key_of(weight), *(() if hp is None else [id(hp)])]


@torch.compiler.assume_constant_result
def traced_gemms() -> int:
    """How many low-precision GEMMs were traced, or ran, in this thread."""
    return _multiplied.traced


@torch.compiler.assume_constant_result
def _note_traced() -> None:
    note_multiplied(None)
