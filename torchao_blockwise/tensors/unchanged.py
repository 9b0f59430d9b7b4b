"""`weights_unchanged`: the scope in which a program declares that weights do not change, so that copies may be kept.

    with weights_unchanged(model):       the microbatches of one optimizer step, evaluation, generation
        for batch in microbatches:
            loss(model(batch)).backward()
    optimizer.step()

The declaration is what makes a kept copy right; no counter could. A change inside that can be seen raises, where the
weight is used next or where the scope is left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.weight_operands import KeptCopies, kept_copies, raise_unchanged

_KEEPS = ("rowwise", "both")


class Scope:
    """The extent of one `weights_unchanged`: the modules of its model, and the master weights that no FSDP2 shards.

    places: (module, attribute, parameter, its values, what is kept of them) of each weight.
    """

    def __init__(self, model: nn.Module, keep: str):
        self.keep = keep
        self.modules = set(model.modules())
        self.places: list[tuple[nn.Module, str, Any, Any, KeptCopies]] = []
        sharded = torch_fsdp.places_of_shards(self.modules)
        for prefix, module in model.named_modules():
            for attribute, parameter in _compat.parameters_of(module).items():
                if parameter is None:
                    continue
                local: Any = _compat.local_of(parameter)
                if not isinstance(local, MasterWeightTensor) or (module, attribute) in sharded:
                    continue
                hp: Any = local.hp
                kept = kept_copies(hp) or KeptCopies(f"{prefix}.{attribute}".lstrip("."), parameter, hp)
                hp.kept_copies = kept
                self.places.append((module, attribute, parameter, hp, kept))
        # A weight that several modules share has one copy.
        self._weights = {kept: hp for *_, hp, kept in self.places}
        for kept in self._weights:
            kept.keeps.append(keep)

    def leave(self) -> None:
        for kept, hp in self._weights.items():
            kept.leave(self.keep)
            if not kept.keeps:
                del hp.kept_copies

    def check(self) -> None:
        """Raise RuntimeError if a weight can be seen to have changed."""
        for module, attribute, parameter, hp, kept in self.places:
            current = _compat.parameters_of(module).get(attribute)
            if current is not parameter or getattr(_compat.local_of(current), "hp", None) is not hp:
                raise_unchanged(kept.name, "replaced")
            kept.check()


_lock = threading.Lock()
_scopes: list[Scope] = []


@contextlib.contextmanager
def weights_unchanged(model: nn.Module, keep: str = "rowwise") -> Iterator[None]:
    """A scope in which each master weight of `model` is quantized once and the copy kept; leaving it frees the copies.

    keep: "rowwise" keeps 1 byte (FP8) or half a byte (NVFP4) a parameter, "both" the columnwise copy too, which
        backward reads, and forward of experts that are stored as [E, K, N].
    For the microbatches of one optimizer step, evaluation and generation: what weights are must not change inside. A
    change that can be seen (of either version counter, `load_state_dict`) raises RuntimeError with the weight's name
    where the weight is used next or the scope is left, a replaced Parameter where the scope is left. Where FSDP2 shards
    the weights, shards are quantized once, in the first forward pass.
    Scopes nest; all threads and compiled layers use the copies; a CUDA graph that is captured inside neither reads nor
    keeps them, those of `torch.compile(mode="reduce-overhead")` too. Backward may run after the scope is left.
    Quantized Parameters (`master_weights=False`) need no scope.
    Raises ValueError for another `keep`.
    """
    if keep not in _KEEPS:
        raise ValueError(f"weights_unchanged: keep must be one of {_KEEPS}, got {keep!r}")
    with _lock:
        scope = Scope(model, keep)
        _scopes.append(scope)
    try:
        yield
    finally:
        with _lock:
            _scopes.remove(scope)
            scope.leave()
    # Not where the scope is left by an exception, which says more.
    scope.check()


def scopes_of(module: nn.Module) -> list[Scope]:
    """The scopes whose models `module` is a part of: FSDP2 asks with the root of a pass."""
    return [scope for scope in _scopes if module in scope.modules]
