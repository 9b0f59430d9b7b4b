"""Scales of weights that FSDP2 shards: amaxes of all blocks of all weights in one MAX all-reduce, then one cast.

    shards ─ amax of block ∩ shard ─▶ one buffer ─ MAX over the shard group ─▶ scales, alike on every rank ─▶ payloads

MAX is exact, so what is gathered equals the whole weight quantised at once, for every split. Amaxes travel as the bits
of magnitudes: among floats a MAX loses a NaN.

When? A rank cannot see that another's values changed, and a collective that only some ranks enter hangs them all. So no
rank decides by what it sees: shards are quantized where each forward pass of a root begins, and where `unshard()` is
called by hand. It is left out in backward, and inside `weights_unchanged` after the first time, which the program, the
same on all ranks, says. What an earlier pass left gathered is let go of, and gathered anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat, _compat_fsdp
from torchao_blockwise.distributed.absence import naming_absent
from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.distributed.primary_shards import cast_loaded, check_shards_alike
from torchao_blockwise.distributed.sharded_weight import Part, Recipe, ShardedWeight, add_amaxes, cast
from torchao_blockwise.ops.partial_cast import block_scales_
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard
from torchao_blockwise.tensors.unchanged import Scope, scopes_of


def sync_weight_scales(model: nn.Module) -> None:
    """Make the scales and the payload of all sharded master weights of `model` match their values; a collective.

    One MAX all-reduce of int32 amaxes, 4 bytes a block, for all weights of a shard group together. It runs by itself
    where a forward pass or `unshard()` begins; call it, on all ranks, where values were changed by hand between the
    forward pass and the gathers of its backward pass, and once where no model was converted in this process: weights
    made by hand. A model without FSDP2 has nothing to do.
    Raises ValueError if ranks differ in their weights, configs or dtypes, RuntimeError if a rank does not come, naming
    the rank and the weight.
    """
    _compat_fsdp.install()
    found = dict.fromkeys(map(_compat_fsdp.state_of, model.modules()))
    states = [state for state in found if state is not None]
    # Before the first forward pass no state knows its root: those go together.
    fresh = tuple(state for state in states if _compat_fsdp.scope_of(state) is None)
    scopes = [_compat_fsdp.scope_of(state) or (fresh[0], fresh) for state in states]
    names = {parameter: name for name, parameter in model.named_parameters()}
    for owner, below in dict.fromkeys(scopes):
        _scales_of(owner, below, names).sync()


class _ShardGroup:
    """The weights that one process group shards: one buffer of block amaxes, one all-reduce."""

    def __init__(self, weights: list[ShardedWeight]):
        self.weights = weights
        self.group = weights[0].parameter.group
        self.device = weights[0].parameter.device
        self.blocks = 0
        self.recipes: dict[Recipe, list[ShardedWeight]] = {}
        for weight in weights:
            if weight.layout.quantized:
                weight.first_block, self.blocks = self.blocks, self.blocks + weight.blocks
                self.recipes.setdefault(weight.recipe, []).append(weight)

    def check_ranks(self) -> None:
        ranks = sorted(self.weights[0].parameter.mesh_ranks)
        check_same("sync_weight_scales", ranks, [weight.description for weight in self.weights])

    def sync(self) -> None:
        bits = torch.zeros(self.blocks, dtype=torch.int32, device=self.device)
        for recipe, parts in self._batches():
            add_amaxes(parts, recipe, bits)
        self._reduce(bits)
        self._reduce_tensor_amaxes(bits)
        encode = torch.empty(self.blocks, dtype=torch.float32, device=self.device)
        for weight in self.weights:
            if weight.layout.quantized:
                weight.renew_scales()
        for recipe, weights in self.recipes.items():
            shards = [weight.shard for weight in weights]
            block_scales_(
                [weight.scales for weight in weights],
                [shard.global_scale for shard in shards if shard.global_scale is not None],
                bits,
                recipe.fmt,
                power_of_2_scales=recipe.power_of_2_scales,
                first_blocks=[weight.first_block for weight in weights],
                encode=encode,
                backend=recipe.backend,
            )
        for recipe, parts in self._batches():
            cast(parts, recipe, encode)
        ready = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        for weight in self.weights:
            weight.publish(ready)

    def _batches(self) -> Iterator[tuple[Recipe, list[Part]]]:
        """What goes through one call; offloaded weights one by one, so that one at a time is on the device."""
        for recipe, weights in self.recipes.items():
            parts = [(weight, weight.master.hp) for weight in weights]
            yield recipe, [part for part in parts if part[1].device == self.device]
            for weight, values in parts:
                if values.device != self.device:
                    yield recipe, [(weight, values.to(self.device, non_blocking=True))]

    def _reduce_tensor_amaxes(self, bits: torch.Tensor) -> None:
        """Give each weight that tensor parallelism splits the amax of all its parts, as that of one more block."""
        by_group: dict = {}
        for weight in self.weights:
            if weight.layout.quantized:
                for group in weight.split_groups:
                    by_group.setdefault(group, []).append(bits[weight.first_block :][: weight.blocks])
        for group, parts in by_group.items():
            amaxes = torch.stack([part.amax() for part in parts])
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
            for part, amax in zip(parts, amaxes.unbind()):
                part[-1].copy_(amax)

    def _reduce(self, bits: torch.Tensor) -> None:
        if self.group is None or self.group.size() == 1 or not self.blocks:
            return
        what = f"reduce the amaxes of {len(self.weights)} weights, {self.weights[0].layout.name} the first,"
        with naming_absent("sync_weight_scales", what, self.group):
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self.group)


class _WeightScales:
    """All sharded master weights below one FSDP2 root."""

    def __init__(self, states, names):
        self.states = states
        # The scopes of `weights_unchanged` that were open at the last sync.
        self.scopes: list[Scope] = []
        weights = [
            ShardedWeight(parameter)
            for parameter in _compat_fsdp.parameters_of(states, names)
            if isinstance(parameter.local, MasterWeightTensor)
        ]
        self.primaries = [p for p in _compat_fsdp.parameters_of(states, names) if isinstance(p.local, QuantizedShard)]
        groups: dict = {}
        for weight in weights:
            groups.setdefault((weight.parameter.group, weight.parameter.device), []).append(weight)
        self.groups = [_ShardGroup(members) for members in groups.values()]
        _reshard_wholly(states)
        for group in self.groups:
            group.check_ranks()
        check_shards_alike(self.primaries)

    @property
    def is_current(self) -> bool:
        return all(weight.is_current for group in self.groups for weight in group.weights)

    def sync(self) -> None:
        self.scopes = self._scopes()
        with torch.no_grad():
            for group in self.groups:
                group.sync()
            cast_loaded(self.primaries)

    def begin_pass(self) -> None:
        """Quantize the shards and let go of what is gathered, unless the program says that weights stand still."""
        if any(scope in self.scopes for scope in self._scopes()):
            for group in self.groups:
                for weight in group.weights:
                    weight.check_unchanged()
            return
        self.sync()
        _compat_fsdp.release_held_gathers(self.states, (MasterWeightTensor, QuantizedShard))

    def _scopes(self) -> list[Scope]:
        return scopes_of(_compat_fsdp.modules_of(self.states[0])[0])


_NOTE = "weight_scales"


def _scales_of(owner, states, names=None) -> _WeightScales:
    """What is kept for the weights of `states`, with `owner`, which lives as long as they do."""
    notes = _compat_fsdp.notes_of(owner)
    scales = notes.get(_NOTE)
    if scales is None or not scales.is_current or scales.states != states:
        for state in states:
            # What was made before FSDP2 knew the root.
            _compat_fsdp.notes_of(state).pop(_NOTE, None)
        # Outside of inference mode: what is made here is changed again in training.
        with torch.inference_mode(False):
            scales = notes[_NOTE] = _WeightScales(states, names or {})
    return scales


def _reshard_wholly(states) -> None:
    """FSDP2 refuses to gather what has hooks of its own, as master weights do, from shards among fewer ranks."""
    partial = _compat_fsdp.partial_reshards(states)
    modules = [
        module for module, shards in partial if any(isinstance(x, (MasterWeightTensor, QuantizedShard)) for x in shards)
    ]
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
    if modules:
        warnings.warn(
            "reshard_after_forward as a number of ranks: FSDP2 cannot gather weights quantised from such shards; "
            f"{len(modules)} modules reshard to all ranks, as with reshard_after_forward=True",
            stacklevel=2,
        )


def _before_gathers(state) -> None:
    if _compat.in_backward():
        return
    _scales_of(*(_compat_fsdp.scope_of(state) or (state, (state,)))).begin_pass()


_compat_fsdp.at_install(_compat_fsdp.watch, _before_gathers)
