"""`weights_unchanged`: the scope in which a program declares that weights stand still, so that copies may be kept.

    with weights_unchanged(model):       the microbatches of one optimizer step, evaluation, generation
        for batch in microbatches:
            loss(model(batch)).backward()
    optimizer.step()

The declaration is what makes a kept copy right; no counter could. A change inside that can be seen raises, where the
weight is used next or where the scope is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.weight_operands import KeptCopies, kept_weights, lock

_KEEPS = ("rowwise", "both")


class _Place:
    """Where a model holds a master weight, and what it held when a scope was entered."""

    def __init__(self, name: str, module: nn.Module, attribute: str, parameter: torch.Tensor):
        self.name, self.module, self.attribute, self.parameter = name, module, attribute, parameter
        self.hp: torch.Tensor = _compat.local_of(parameter).hp  # type: ignore[attr-defined]
        self._versions = self._count()

    def check(self) -> None:
        """Raise RuntimeError if the weight can be seen to have changed."""
        current = _compat.parameters_of(self.module).get(self.attribute)
        replaced = current is not self.parameter or getattr(_compat.local_of(current), "hp", None) is not self.hp
        if replaced or self._count() != self._versions:
            raise RuntimeError(
                f"weights_unchanged: {self.name} was {'replaced' if replaced else 'changed'} inside the scope, which "
                "keeps quantized copies of the old values; leave the scope before optimizer steps, loads and edits"
            )

    def _count(self) -> tuple[int, ...]:
        # Compiled optimizers move the first one alone, writes to `hp` the second.
        return tuple(_compat.version_of(x) for x in (self.parameter, self.hp) if not x.is_inference())


class Scope:
    """What one `weights_unchanged` covers: the modules of its model, and the places of weights that no FSDP2 shards."""

    def __init__(self, model: nn.Module):
        self.modules = set(model.modules())
        self.places: dict[nn.Module, list[_Place]] = {}
        sharded = torch_fsdp.places_of_shards(self.modules)
        for prefix, module in model.named_modules():
            for attribute, parameter in _compat.parameters_of(module).items():
                if parameter is None or (module, attribute) in sharded:
                    continue
                if isinstance(_compat.local_of(parameter), MasterWeightTensor):
                    place = _Place(f"{prefix}.{attribute}".lstrip("."), module, attribute, parameter)
                    self.places.setdefault(module, []).append(place)

    def check(self) -> None:
        for places in self.places.values():
            for place in places:
                place.check()


_scopes: list[Scope] = []


@contextlib.contextmanager
def weights_unchanged(model: nn.Module, keep: str = "rowwise") -> Iterator[None]:
    """A scope in which each master weight of `model` is quantized once and the copy kept; leaving it frees the copies.

    keep: "rowwise" keeps 1 byte (FP8) or half a byte (NVFP4) a parameter, "both" the columnwise copy too, which
        backward reads, and forward of experts that are stored as [E, K, N].
    For the microbatches of one optimizer step, evaluation and generation: what weights are must not change inside. A
    change that can be seen (of either version counter, a replaced Parameter, `load_state_dict`) raises RuntimeError
    with the weight's name. Where FSDP2 shards the weights, shards are quantized once, in the first forward pass.
    Scopes nest; all threads and compiled layers use the copies; a CUDA graph that is captured inside neither reads nor
    keeps them, those of `torch.compile(mode="reduce-overhead")` too. Backward may run after the scope is left.
    Quantized Parameters (`master_weights=False`) need no scope.
    Raises ValueError for another `keep`.
    """
    if keep not in _KEEPS:
        raise ValueError(f"weights_unchanged: keep must be one of {_KEEPS}, got {keep!r}")
    scope = Scope(model)
    # A weight that several modules share has one copy.
    weights = {id(place.hp): place for places in scope.places.values() for place in places}
    with lock:
        for key, place in weights.items():
            kept_weights.setdefault(key, KeptCopies(place.hp, place.check)).keeps.append(keep)
        _scopes.append(scope)
    try:
        yield
    finally:
        with lock:
            _scopes.remove(scope)
            for key in weights:
                kept_weights[key].leave(keep)
                if not kept_weights[key].keeps:
                    del kept_weights[key]
    # Not where the scope is left by an exception, which says more.
    scope.check()


def scopes_of(module: nn.Module) -> list[Scope]:
    """The scopes whose models `module` is a part of."""
    return [scope for scope in _scopes if module in scope.modules]


def check_unchanged(module: nn.Module) -> None:
    """Raise RuntimeError if a scope covers `module` and a weight of it can be seen to have changed."""
    for scope in _scopes:
        for place in scope.places.get(module, ()):
            place.check()
