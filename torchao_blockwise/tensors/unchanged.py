"""`weights_unchanged`: a scope in which the program declares that weights do not change, so quantized copies are kept.

    with weights_unchanged(model):       the microbatches of one optimizer step, evaluation, generation
        for batch in microbatches:
            loss(model(batch)).backward()
    optimizer.step()

If a change inside the scope is detected, the next use of the weight or the exit of the scope raises.
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


class Scope:
    """One `weights_unchanged` scope: the modules of its model, and the master weights that FSDP2 does not shard.

    places: (module, attribute, Parameter, its values, their kept copies) of each weight.
    """

    def __init__(self, model: nn.Module, keep: str):
        self.keep = keep
        self.modules = set(model.modules())
        self.places: list[tuple[nn.Module, str, Any, Any, KeptCopies]] = []
        self._weights: dict[KeptCopies, Any] = {}
        shards = torch_fsdp.parameters_of(torch_fsdp.states_of(self.modules), {})
        sharded = {place for p in shards for place in p.places}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            prefix, _, attribute = name.rpartition(".")
            module, local = model.get_submodule(prefix), _compat.local_of(parameter)
            if isinstance(local, MasterWeightTensor) and (module, attribute) not in sharded:
                hp: Any = local.hp
                kept = kept_copies(hp)
                if kept is None:
                    kept = hp.kept_copies = KeptCopies(name, parameter, hp)
                self.places.append((module, attribute, parameter, hp, kept))
                # A weight that several modules share has one entry.
                if kept not in self._weights:
                    self._weights[kept] = hp
                    kept.keeps.append(keep)

    def leave(self) -> None:
        for kept, hp in self._weights.items():
            kept.leave(self.keep)
            if not kept.keeps:
                del hp.kept_copies

    def check(self) -> None:
        """Raise RuntimeError if a change of a weight is detected."""
        for module, attribute, parameter, hp, kept in self.places:
            current = _compat.parameters_of(module).get(attribute)
            if current is not parameter or getattr(_compat.local_of(current), "hp", None) is not hp:
                raise_unchanged(kept.name, "replaced")
            kept.check()


_lock = threading.Lock()
_scopes: list[Scope] = []


@contextlib.contextmanager
def weights_unchanged(model: nn.Module, keep: str = "rowwise") -> Iterator[None]:
    """Quantize each master weight of `model` once and keep the copy while the scope is open.

    keep: "rowwise" keeps 1 byte (FP8) or half a byte (NVFP4) per parameter. "both" also keeps the columnwise copy,
        which is used in backward (and in the forward of experts stored as [E, K, N]).
    Use it for the microbatches of one optimizer step, for evaluation and for generation. Weights must not change inside
    the scope. If a change is detected (through a version counter, or in `load_state_dict`), the next use of the weight
    or the exit of the scope raises RuntimeError with the weight's name. For a replaced Parameter, the exit raises.
    FSDP2 shards are quantized once, in the first forward pass.
    Scopes can be nested. All threads and compiled layers use the copies, except that compiled code quantizes views of a
    weight, such as groups of its rows, on each use. CUDA graphs captured inside the scope, also by
    `torch.compile(mode="reduce-overhead")`, do not use the copies. Backward may run after the scope has exited.
    Quantized Parameters (`master_weights=False`) do not need the scope.
    Raises ValueError for an unknown `keep`.
    """
    if keep not in (keeps := ("rowwise", "both")):
        raise ValueError(f"weights_unchanged: keep must be one of {keeps}, got {keep!r}")
    with _lock:
        scope = Scope(model, keep)
        _scopes.append(scope)
    try:
        yield
    finally:
        with _lock:
            _scopes.remove(scope)
            scope.leave()
    # Not if an exception exits the scope, because that one is more informative.
    scope.check()


def scopes_of(module: nn.Module) -> list[Scope]:
    """Return the scopes whose models contain `module`, such as the root module of an FSDP2 forward pass."""
    return [scope for scope in _scopes if module in scope.modules]
