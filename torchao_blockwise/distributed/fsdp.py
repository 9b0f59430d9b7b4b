"""FSDP2 gathers weights quantized: their shards are cast at the beginning of each forward pass of the root.

    master weight       ─ in each pass ──────────────────▶ the QuantizedShard next to it ┐
    quantized Parameter ─ if values were loaded since ───▶ its QuantizedShard ───────────┴─▶ gathers (tensors/fsdp.py)

A rank cannot know that another rank's values changed, and a collective that only some ranks enter hangs all of them. So
no rank decides locally: shards are cast at the beginning of each forward pass of a root, and when `unshard()` is called
by hand. They are not cast in backward, nor again inside `weights_unchanged`, which programs enter on all ranks. Weights
that an earlier pass left gathered are released and gathered again.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import modes, torch_fsdp
from torchao_blockwise._compat.torch_fsdp import FsdpParameter
from torchao_blockwise.distributed.cast import PartialCast, cast_of_shard, run_partial_casts
from torchao_blockwise.distributed.rank_consistency import check_same, digest
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.fsdp import ShardLayout, attach, is_current
from torchao_blockwise.tensors.unchanged import Scope, scopes_of
from torchao_blockwise.tensors.weight_operands import raise_unchanged

_KINDS = (MasterWeightTensor, QuantizedShard)
_SUBJECT = "sync_weight_scales"
# The attribute of FSDP2's states, or of the object that they share, that holds their root.
_ROOT = "torchao_blockwise_root"


def sync_weight_scales(model: nn.Module) -> None:
    """Make the scales and payload of all sharded weights of `model` match their current values; a collective.

    Runs one MAX all-reduce of int32 amaxes, 4 bytes per block, for all weights of a shard group. Called automatically
    when a forward pass or `unshard()` begins. Call it yourself, on all ranks, after changing values between the forward
    pass and the all-gathers of its backward pass. Does nothing for a model without FSDP2.
    Raises ValueError if ranks differ in their weights, configs or dtypes, RuntimeError if a rank is missing. Both name
    the rank and the weight.
    """
    states = torch_fsdp.states_of(model.modules())
    # Before the first forward pass states do not know their root; they are synchronized together.
    fresh = tuple(state for state in states if torch_fsdp.scope_of(state) is None)
    scopes = [torch_fsdp.scope_of(state) or (fresh[0], fresh) for state in states]
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for owner, below in dict.fromkeys(scopes):
        _root_of(owner, below, names).sync()


def _before_gathers(state: torch_fsdp.State) -> None:
    if not _compat.in_backward():
        _root_of(*(torch_fsdp.scope_of(state) or (state, (state,)))).begin_pass()


class Root:
    """All quantized weights that FSDP2 shards below one root.

    masters: master weights, each with the shard that its gathers send, or the shard's layout if it is gathered in high
        precision.
    scopes: the scopes of `weights_unchanged` that were open at the last sync.
    captured: the scale tensors that CUDA graphs write to.
    """

    def __init__(self, states: tuple[torch_fsdp.State, ...], names: Mapping[torch.Tensor, str]):
        self.states = states
        self.scopes: list[Scope] = []
        self.captured: list[torch.Tensor | None] = []
        torch_fsdp.lazy_init(states)
        self.parameters = [p for p in torch_fsdp.parameters_of(states, names) if isinstance(p.local, _KINDS)]
        lay_out_shards(self.parameters)
        self.masters = [(p, _shard_of_master(p)) for p in self.parameters if isinstance(p.local, MasterWeightTensor)]
        _reshard_wholly(states)
        _check_same(self.parameters, [_described(p) for p in self.parameters])

    def begin_pass(self) -> None:
        """Cast the shards and release gathered weights, unless `weights_unchanged` says that they are current."""
        if any(scope in self.scopes for scope in self._open_scopes()):
            for p, shard in self.masters:
                if isinstance(shard, QuantizedShard) and not is_current(_master(p)):
                    raise_unchanged(p.name, "changed")
            return
        self.sync()
        torch_fsdp.release_held_gathers(self.states, _KINDS)

    @torch.no_grad()
    def sync(self) -> None:
        self.scopes = self._open_scopes()
        shards = [(p, shard) for p, shard in self.masters if isinstance(shard, QuantizedShard)]
        captures = bool(shards) and modes.is_capturing(shards[0][1].scale)
        casts = [(p.group, shard, _cast_of_master(p, shard, new_scales=not captures)) for p, shard in shards]
        if captures:
            self.captured += [x for *_, cast in casts for x in (cast.scale, cast.global_scale)]
        waiting = [(p, p.local) for p in self.parameters if isinstance(p.local, QuantizedShard) and p.local.awaits_cast]
        # Amaxes are reduced by position, so all ranks must have loaded values for the same weights.
        _check_same([p for p, _ in waiting], [f"values for {p.name}" for p, _ in waiting])
        cast_shards(casts + [(p.group, shard, _cast_of_loaded(p, shard)) for p, shard in waiting])
        for p, shard in self.masters:
            attach(shard, _master(p))

    def _open_scopes(self) -> list[Scope]:
        return scopes_of(torch_fsdp.module_of(self.states[0]))


def _root_of(
    owner: object, states: tuple[torch_fsdp.State, ...], names: Mapping[torch.Tensor, str] | None = None
) -> Root:
    """Return the root of `states`, created once and stored with `owner`, which lives as long as they do."""
    root: Root | None = getattr(owner, _ROOT, None)
    if root is None or root.states != states:
        for state in states:
            # Roots that were created before FSDP2 knew the real one.
            vars(state).pop(_ROOT, None)
        # Tensors created in inference mode could not be changed in training.
        with torch.inference_mode(False):
            root = Root(states, names or {})
        setattr(owner, _ROOT, root)
    return root


@torch.no_grad()
def cast_shards(shards: Sequence[tuple[dist.ProcessGroup | None, QuantizedShard, PartialCast]]) -> None:
    """Quantize shards, bitwise identical to the whole weights quantized; one all-reduce for each process group."""
    by_group: dict[tuple[dist.ProcessGroup | None, torch.device], list[tuple[QuantizedShard, PartialCast]]] = {}
    for group, shard, cast in shards:
        by_group.setdefault((group, shard.device), []).append((shard, cast))
    for (group, device), members in by_group.items():
        what = f"reduce the amaxes of {len(members)} weights, {members[0][0].part.name} the first,"
        run_partial_casts([cast for _, cast in members], group, _SUBJECT, what)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        for shard, _ in members:
            shard.ready = ready
            shard.pending_master.cast_is_done()


# --- master weights ---------------------------------------------------------------------------------------------------


def _master(p: FsdpParameter) -> MasterWeightTensor:
    return p.local  # type: ignore[return-value]


def _shard_of_master(p: FsdpParameter) -> QuantizedShard | ShardLayout:
    master = _master(p)
    layout = _layout_of(p, master.config)
    if len(p.places) > 1 and not all(isinstance(module, nn.Linear) for module, _ in p.places):
        # Modules other than linear layers, such as embeddings, need the values.
        return layout
    fmt = master.fmt
    # Zeros, because 4-bit rows of odd length end inside a byte.
    qdata = torch.zeros(fmt.qdata_shape(*layout.local_shape), dtype=torch.uint8, device=p.device)
    scale = torch.empty(fmt.scale_shape(*layout.shape), dtype=fmt.scale_dtype, device=p.device)
    matrices = layout.shape[:-2] if master.config.scale_per_expert else ()
    global_scale = torch.empty(matrices, device=p.device, dtype=torch.float32) if fmt.has_global_scale else None
    return QuantizedShard(qdata.view(fmt.element.storage_dtype), scale, layout, master.dtype, global_scale)


def _cast_of_master(p: FsdpParameter, shard: QuantizedShard, new_scales: bool) -> PartialCast:
    """Return the cast of a master weight.

    new_scales: whether to write to new scale tensors, since gathered weights hold the old ones. A CUDA graph writes to
        those of the last pass before the capture, whose addresses are in device memory already.
    """
    split_groups: tuple[dist.ProcessGroup, ...] = ()
    if shard.global_scale is not None:
        if shard.global_scale.dim() == 0:
            split_groups = tuple(group for group, _ in p.splits)
        elif any(dim >= len(p.shape) - 2 for _, dim in p.splits):
            raise ValueError(
                f"fully_shard: tensor parallelism splits the experts of {p.name} {list(p.shape)}, but each expert has "
                "one tensor scale; distribute whole experts over ranks (ExpertParallel), or use scale_per_expert=False"
            )
    blocks = shard.scale.numel()
    entries = blocks + bool(split_groups)
    if new_scales:
        scale = torch.empty(entries, dtype=shard.scale.dtype, device=shard.device)
        shard.scale = scale[:blocks].view(shard.scale.shape)
        shard.global_scale = None if shard.global_scale is None else torch.empty_like(shard.global_scale)
    else:
        scale = shard.scale.as_strided((entries,), (1,))
    return cast_of_shard(shard, _master(p).hp)._replace(scale=scale, split_groups=split_groups)


def _reshard_wholly(states: tuple[torch_fsdp.State, ...]) -> None:
    """Reshard to all ranks: FSDP2 cannot gather tensors with all-gather hooks, such as ours, from fewer ranks."""
    modules = torch_fsdp.partial_reshards(states, _KINDS)
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
    if modules:
        warnings.warn(
            "reshard_after_forward as a number of ranks is not supported by FSDP2 for quantized all-gathers; "
            f"{len(modules)} modules reshard to all ranks, as with reshard_after_forward=True",
            stacklevel=2,
        )


# --- quantized Parameters ---------------------------------------------------------------------------------------------


def _cast_of_loaded(p: FsdpParameter, shard: QuantizedShard) -> PartialCast:
    # Without loaded values it was given its own decoded ones, from a state dict; the master has the exact ones.
    master = None if shard.pending_master.hp is not None else shard.pending_master.master(p.parameter)
    values = shard.values() if master is None else _compat.local_of(master)
    return cast_of_shard(shard, values.to(shard.device))


def lay_out_shards(parameters: Iterable[FsdpParameter]) -> None:
    """Set the layouts of quantized shards, which `fully_shard` does not know: name, ranks, and gathered dtype."""
    for p in parameters:
        if isinstance(p.local, QuantizedShard):
            p.local.part = _layout_of(p, p.local.part.config)


# --- what ranks compare -----------------------------------------------------------------------------------------------


def _layout_of(p: FsdpParameter, config: TrainingConfig) -> ShardLayout:
    return ShardLayout(p.name, p.shape, p.dtype, p.dim, p.rank, p.ranks, config)


def _check_same(parameters: Sequence[FsdpParameter], entries: Sequence[str]) -> None:
    for ranks in dict.fromkeys(p.mesh_ranks for p in parameters):
        check_same(_SUBJECT, sorted(ranks), [e for p, e in zip(parameters, entries) if p.mesh_ranks == ranks])


def _described(p: FsdpParameter) -> str:
    """Describe what must be equal on all ranks, for a quantized Parameter also scales that were not made by a cast."""
    local: Any = p.local
    # Ranks may have different seeds.
    gathered = f"{dataclasses.replace(local.config, seed=0) if local.config.seed else local.config}"
    if isinstance(local, QuantizedShard) and not local.awaits_cast:
        scales = [x.reshape(-1).view(torch.uint8).cpu() for x in (local.scale, local.global_scale) if x is not None]
        gathered += f", scales {digest(b''.join(x.numpy().tobytes() for x in scales))}"
    kind = f"{type(local).__name__} {local.dtype}, dim {p.dim} over {p.ranks} ranks"
    return f"{p.name} {list(p.shape)} ({kind}), gathered from {p.dtype} as {gathered}"


torch_fsdp.before_gathers = _before_gathers
