"""Shards of weights that are quantized themselves: their cast, and what ranks must have in common.

A cast is a collective, so that only what the program does alike on all ranks may lead to one: a step of their
optimizer, and, where a forward pass of a root begins, values that were loaded or copied in since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.distributed.master_weights import write_masters
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.fsdp import layout_of
from torchao_blockwise.tensors.rounding import carry_key


def shard_of(weight: QuantizedTensor, parameter: torch_fsdp.FsdpParameter) -> QuantizedShard:
    """What the rank holds of `weight`; memory of its own, so that the whole is freed.

    Raises ValueError for another dim than rows, for offloading, or where an optimizer has the weight's master.
    """
    refusal = _why_not_sharded(weight, parameter)
    if refusal is not None:
        raise ValueError(f"fully_shard: {parameter.name} {list(weight.shape)} is quantized itself, and {refusal}")
    assert weight.config is not None
    layout = layout_of(parameter, weight.config)
    rows = slice(layout.start, layout.start + layout.local_shape[0])
    global_scale = None if weight.global_scale is None else weight.global_scale.clone()
    shard = QuantizedShard(weight.qdata[rows].clone(), weight.scale.clone(), layout, weight.dtype, global_scale)
    carry_key(weight, shard)
    values = None if weight.pending_master is None else weight.pending_master.hp
    if values is not None:
        # Scales are of this rank's values; of all ranks' parts they are with the first cast.
        shard.take_values(values.detach()[rows])
    return shard


def _why_not_sharded(weight: QuantizedTensor, parameter: torch_fsdp.FsdpParameter) -> str | None:
    """Why a weight cannot be sharded so, with the remedy, or None."""
    if parameter.dim:
        return f"Shard({parameter.dim}) would cut its rows; shard dim 0, or convert with master_weights=True"
    if parameter.offloaded:
        return "is cast on its device; leave CPUOffloadPolicy out, or convert with master_weights=True"
    if weight.config is None or weight.fmt is not weight.config.weight_format:
        return "has no config to train by; make it with quantize_(model, config)"
    if weight.pending_master is not None and weight.pending_master.is_owned:
        return "has its master in an optimizer already; make MasterWeightOptimizer after fully_shard"
    return None


@torch.no_grad()
def cast_shards(shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Quantize what ranks hold of weights; one all-reduce of amaxes a shard group.

    shards: (Parameter, a DTensor around a QuantizedShard; this rank's values of it, flat). Bit for bit what quantizing
        the whole weight gives.
    """
    by_group: dict[tuple[dist.ProcessGroup | None, torch.device], list[tuple[Any, torch.Tensor]]] = {}
    for weight, values in shards:
        by_group.setdefault((shard_group(weight), weight.device), []).append((_compat.local_of(weight), values))
    for (group, _), members in by_group.items():
        held, masters = zip(*members)
        starts, targets = [shard.start for shard in held], [shard.own_bytes for shard in held]
        write_masters("cast_master_weights", held, masters, starts, group, targets)
        for shard in held:
            shard.pending_master.cast_is_done()


def cast_loaded(parameters: Sequence[torch_fsdp.FsdpParameter]) -> None:
    """Cast the weights whose values were loaded or copied in; a collective where there are any."""
    loaded = [p for p in parameters if p.local.pending_master.awaits_cast]  # type: ignore[attr-defined]
    for ranks in dict.fromkeys(p.mesh_ranks for p in loaded):
        # By position: values that a rank alone has changed would be cast into another rank's weights.
        names = [p.name for p in loaded if p.mesh_ranks == ranks]
        check_same("sync_weight_scales of loaded weights", sorted(ranks), names)
    shards = []
    for p in loaded:
        shard: Any = p.local
        master = shard.pending_master.master(p.parameter) if shard.pending_master.hp is None else None
        values = shard.values() if master is None else _compat.local_of(master)
        shards.append((p.parameter, values.to(shard.device).reshape(-1)))
    cast_shards(shards)


def check_shards_alike(parameters: Sequence[torch_fsdp.FsdpParameter]) -> None:
    """Raise on all ranks if they differ in their weights, or in scales that no cast has made; once for a model."""
    for ranks in dict.fromkeys(p.mesh_ranks for p in parameters):
        check_same("fully_shard", sorted(ranks), [_described(p) for p in parameters if p.mesh_ranks == ranks])


def _described(p: torch_fsdp.FsdpParameter) -> str:
    shard: Any = p.local
    known = "scales to be made"
    if not shard.pending_master.awaits_cast:
        scales = [x for x in (shard.scale, shard.global_scale) if x is not None]
        data = b"".join(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for x in scales)
        known = f"scales {hashlib.blake2b(data, digest_size=4).hexdigest()}"
    kind = f"{shard.fmt.name}, {shard.config.of_all_ranks}, gathered from {shard.values_dtype}"
    return f"{p.name} {list(p.shape)} {shard.dtype} ({kind}), over {p.ranks} ranks, {known}"


def shard_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which FSDP2 has split a weight; None where each has all of it."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    return weight.device_mesh.get_group(dims[-1]) if dims else None  # type: ignore[attr-defined]
