"""The weights below one FSDP2 root: what ranks agree upon once, and cast together where a pass begins."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.distributed.cast import cast_parts
from torchao_blockwise.distributed.fsdp.masters import ShardedMaster
from torchao_blockwise.distributed.fsdp.quantized import cast_loaded, check_shards_alike
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard
from torchao_blockwise.tensors.unchanged import Scope, scopes_of

_KINDS = (MasterWeightTensor, QuantizedShard)
_NOTE = "root"


class Root:
    """All quantized weights that FSDP2 shards below one root.

    groups: master weights that go through one cast: those of a process group and a device.
    scopes: those of `weights_unchanged` that were open at the last sync.
    """

    def __init__(self, states: tuple[torch_fsdp.State, ...], names: Mapping[torch.Tensor, str]):
        self.states = states
        self.scopes: list[Scope] = []
        self.groups: dict[tuple[dist.ProcessGroup | None, torch.device], list[ShardedMaster]] = {}
        self.quantized = []
        for parameter in torch_fsdp.parameters_of(states, names):
            if isinstance(parameter.local, MasterWeightTensor):
                key = parameter.group, parameter.device
                self.groups.setdefault(key, []).append(ShardedMaster(parameter))
            elif isinstance(parameter.local, QuantizedShard):
                self.quantized.append(parameter)
        _reshard_wholly(states)
        for weights in self.groups.values():
            ranks = sorted(weights[0].parameter.mesh_ranks)
            check_same("sync_weight_scales", ranks, [weight.description for weight in weights])
        check_shards_alike(self.quantized)

    @property
    def is_laid_out(self) -> bool:
        return all(weight.is_laid_out for weights in self.groups.values() for weight in weights)

    def begin_pass(self) -> None:
        """Quantize the shards and let go of what is gathered, unless the program says that weights stand still."""
        if any(scope in self.scopes for scope in self._open_scopes()):
            for weights in self.groups.values():
                for weight in weights:
                    weight.check_unchanged()
            return
        self.sync()
        torch_fsdp.release_held_gathers(self.states, _KINDS)

    def sync(self) -> None:
        self.scopes = self._open_scopes()
        with torch.no_grad():
            for weights in self.groups.values():
                sync_group(weights)
            cast_loaded(self.quantized)

    def _open_scopes(self) -> list[Scope]:
        return scopes_of(torch_fsdp.modules_of(self.states[0])[0])


def sync_group(weights: list[ShardedMaster]) -> None:
    """Cast the master weights that one process group shards: one all-reduce."""
    parts = {weight: weight.part() for weight in weights if weight.layout.quantized}
    group, device = weights[0].parameter.group, weights[0].parameter.device
    what = f"reduce the amaxes of {len(weights)} weights, {weights[0].layout.name} the first,"
    cast_parts([*parts.values()], group, "sync_weight_scales", what)
    ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    for weight in weights:
        weight.publish(parts.get(weight), ready)


def root_of(
    owner: object, states: tuple[torch_fsdp.State, ...], names: Mapping[torch.Tensor, str] | None = None
) -> Root:
    """The root of `states`, made once and kept with `owner`, which lives as long as they do."""
    notes = torch_fsdp.notes_of(owner)
    root = notes.get(_NOTE)
    if root is None or not root.is_laid_out or root.states != states:
        for state in states:
            # What was made before FSDP2 knew the root.
            torch_fsdp.notes_of(state).pop(_NOTE, None)
        # Outside of inference mode: what is made here is changed again in training.
        with torch.inference_mode(False):
            root = notes[_NOTE] = Root(states, names or {})
    return root


def _reshard_wholly(states: tuple[torch_fsdp.State, ...]) -> None:
    """FSDP2 refuses to gather what has hooks of its own, as master weights do, from shards among fewer ranks."""
    partial = torch_fsdp.partial_reshards(states)
    modules: list[Any] = [module for module, shards in partial if any(isinstance(x, _KINDS) for x in shards)]
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
    if modules:
        warnings.warn(
            "reshard_after_forward as a number of ranks: FSDP2 cannot gather weights quantized from such shards; "
            f"{len(modules)} modules reshard to all ranks, as with reshard_after_forward=True",
            stacklevel=2,
        )
