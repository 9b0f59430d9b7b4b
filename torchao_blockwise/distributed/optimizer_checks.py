"""What `MasterWeightOptimizer` refuses before anything changes, and what ranks must have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.distributed.param_groups import described_options, described_parameter, quantized_of
from torchao_blockwise.tensors import QuantizedShard


def check_parameters(
    name: str,
    groups: Sequence[dict[str, Any]],
    names: Mapping[torch.Tensor, str],
    group: dist.ProcessGroup | None,
    what: str,
) -> None:
    """Check the parameters that will be stepped, and that ranks are about to do the same.

    names: of all parameters of the model. group: ranks with the same whole weights; else those of FSDP2's shards.
    """

    def name_of(p: torch.Tensor) -> str:
        return names.get(p, "a parameter that is not the model's")

    given = [p for g in groups for p in g["params"]]
    for p in given:
        refusal = _why_no_master(p, whole=group is not None)
        if refusal is not None:
            raise ValueError(f"{name}: {name_of(p)} {refusal}")
    ranks = _mesh_ranks(given) if group is None else dist.get_process_group_ranks(group)
    if len(ranks) > 1:
        entries = [what]
        for i, options in enumerate(groups):
            entries.append(f"group {i}: {described_options(options)}")
            entries += [f"{name_of(p)} ({described_parameter(p)}) in group {i}" for p in options["params"]]
        entries += [f"{known} ({described_parameter(p)})" for p, known in names.items()]
        check_same(name, sorted(ranks), entries)


def checked_group(name: str, group: dist.ProcessGroup | None, shard: str | None) -> dist.ProcessGroup | None:
    if shard not in (None, "zero1", "zero2"):
        raise ValueError(f'{name}: shard must be "zero1", "zero2" or None, got {shard!r}')
    if group is None and shard is not None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(f"{name}: shard={shard!r} needs ranks; call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in process_group; make it on the group's ranks alone")
    return group


def _why_no_master(p: torch.Tensor, whole: bool) -> str | None:
    """Why a parameter cannot be stepped, with the remedy, or None. whole: ranks are to have the same whole weights."""
    quantized = quantized_of(p)
    if whole and isinstance(quantized, QuantizedShard):
        return "is split by FSDP2 already; leave process_group and shard out, which are for whole weights"
    if quantized is None:
        return None
    if not quantized.fmt.is_square:
        return "has blocks of {}x{}; make it with square blocks".format(*quantized.fmt.block)
    if quantized is not p and not isinstance(quantized, QuantizedShard):
        return "is quantised and split by tensor parallelism; convert with master_weights=True"
    return None


def _mesh_ranks(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The ranks that hold parts of the quantised parameters that FSDP2 shards."""
    meshes = [p.device_mesh.mesh for p in parameters if quantized_of(p) is not None and hasattr(p, "device_mesh")]
    return sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
