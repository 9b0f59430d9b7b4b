"""Parameter groups: what an optimizer is given, what is refused of it, and what ranks must have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise.distributed.rank_consistency import check_same
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor

# Keys of a group that are no options.
PARAMETERS = ("params", "param_names")


def quantized_of(p: torch.Tensor) -> QuantizedTensor | None:
    """What this rank holds of a parameter that is quantized itself, sharded or not; None of another."""
    return local if isinstance(local := _compat.local_of(p), QuantizedTensor) else None


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """New groups with lists of parameters, without the quantized ones that are frozen.

    params: parameters, (name, parameter), or groups of either.
    """
    params = list(params)
    groups = [dict(group) for group in params] if params and isinstance(params[0], dict) else [{"params": params}]
    for group in groups:
        items = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        named = [item if isinstance(item, tuple) else (None, item) for item in items]
        kept = [(name, p) for name, p in named if quantized_of(p) is None or p.requires_grad]
        group["params"] = [p for _, p in kept]
        if any(name is not None for name, _ in named):
            group["param_names"] = [name for name, _ in kept]
    return groups


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def described_options(group: dict[str, Any]) -> str:
    """Options in words; a tensor's value is left on its device."""
    plain = {key: value for key, value in options_of(group).items() if not isinstance(value, torch.Tensor)}
    return ", ".join(f"{key}={value}" for key, value in sorted(plain.items())) or "no options"


def _described(p: torch.Tensor) -> str:
    quantized = quantized_of(p)
    kind = type(p).__name__ if quantized is None else f"{quantized.fmt.name}, {quantized.config}"
    return f"{kind}, {list(p.shape)} {p.dtype}" + ", frozen" * (not p.requires_grad)


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
            entries += [f"{name_of(p)} ({_described(p)}) in group {i}" for p in options["params"]]
        entries += [f"{known} ({_described(p)})" for p, known in names.items()]
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
        return "is quantized and split by tensor parallelism; convert with master_weights=True"
    return None


def _mesh_ranks(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The ranks that hold parts of the quantized parameters that FSDP2 shards."""
    meshes = [p.device_mesh.mesh for p in parameters if quantized_of(p) is not None and hasattr(p, "device_mesh")]
    return sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
