"""Parameter groups and state dicts of `MasterWeightOptimizer`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise.distributed.master_weights import own_group, why_not_written
from torchao_blockwise.distributed.rank_consistency import check_same
from torchao_blockwise.distributed.zero.weights import NAME, PrimaryWeight, gather_parts
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor

# Keys of a group that are not options.
PARAMETERS = ("params", "param_names")
# The key of a master among the states of its parameter.
MASTER = "master"
# The name of an unnamed parameter in errors.
UNNAMED = "a parameter that is not the model's"


def quantized_of(p: torch.Tensor) -> QuantizedTensor | None:
    """Return this rank's tensor of a quantized Parameter, sharded or not; None for another parameter."""
    return local if isinstance(local := _compat.local_of(p), QuantizedTensor) else None


def drop_frozen(group: dict[str, Any]) -> None:
    """Remove frozen quantized parameters from a group."""
    stepped = [quantized_of(p) is None or p.requires_grad for p in group["params"]]
    for key in PARAMETERS:
        if key in group:
            group[key] = list(itertools.compress(group[key], stepped))


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def described_options(group: dict[str, Any]) -> str:
    """Describe options, without tensors, since reading their values would synchronize."""
    plain = {key: value for key, value in options_of(group).items() if not isinstance(value, torch.Tensor)}
    return ", ".join(f"{key}={value}" for key, value in sorted(plain.items())) or "no options"


def _why_not_stepped(p: torch.Tensor, quantized: QuantizedTensor, group: dist.ProcessGroup | None) -> str | None:
    """Why the optimizer cannot step the quantized Parameter `p`, or None if it can."""
    if isinstance(quantized, QuantizedShard):
        if group is not None:
            return "is split by FSDP2 already; leave process_group and shard out, which are for whole weights"
    elif quantized is not p:
        return "is quantized and split by tensor parallelism; convert with master_weights=True"
    return why_not_written(quantized)


def check_parameters(
    groups: Sequence[dict[str, Any]], names: Mapping[torch.Tensor, str], group: dist.ProcessGroup | None, what: str
) -> None:
    """Check the parameters of groups, and that all ranks have the same ones with the same options.

    names: of all parameters of the model. group: ranks with the same whole weights; None: the ranks of FSDP2's shards.
    """
    ranks = set() if group is None else set(dist.get_process_group_ranks(group))
    for p in (p for g in groups for p in g["params"]):
        if (quantized := quantized_of(p)) is None:
            continue
        if (reason := _why_not_stepped(p, quantized, group)) is not None:
            raise ValueError(f"{NAME}: {names.get(p, UNNAMED)} {reason}")
        if isinstance(quantized, QuantizedShard):
            ranks |= set(p.device_mesh.mesh.flatten().tolist())
    if len(ranks) > 1:
        entries = [what]
        for i, options in enumerate(groups):
            entries.append(f"group {i}: {described_options(options)}")
            entries += [f"{names.get(p, UNNAMED)} ({_described(p)}) in group {i}" for p in options["params"]]
        entries += [f"{known} ({_described(p)})" for p, known in names.items()]
        check_same(NAME, sorted(ranks), entries)


def _described(p: torch.Tensor) -> str:
    quantized = quantized_of(p)
    kind = type(p).__name__ if quantized is None else f"{quantized.fmt.name}, {quantized.config}"
    return f"{kind}, {list(p.shape)} {p.dtype}" + ", frozen" * (not p.requires_grad)


def checked_group(group: dist.ProcessGroup | None, shard: str | None) -> dist.ProcessGroup | None:
    if shard not in (None, "zero1", "zero2"):
        raise ValueError(f'{NAME}: shard must be "zero1", "zero2" or None, got {shard!r}')
    if group is None and shard is None:
        return None
    if (group := own_group(NAME, group)) is None:
        raise ValueError(f"{NAME}: shard={shard!r} needs ranks; call torch.distributed.init_process_group first")
    return group


# --- state dicts ------------------------------------------------------------------------------------------------------


def whole_states(
    states: Mapping[int, dict[str, Any]],
    parameters: Sequence[torch.Tensor],
    weights: Mapping[torch.Tensor, PrimaryWeight],
    group: dist.ProcessGroup | None,
) -> dict[int, dict[str, Any]]:
    """Return unsharded states by the index of their parameter; a collective if states are sharded."""
    whole = {}
    for index, state in states.items():
        weight = weights.get(parameters[index])
        if weight is not None:
            split = {key: x for key, x in state.items() if getattr(x, "shape", None) == weight.master.shape}
            state = {**state, **{key: gather_parts(weight, x, group) for key, x in split.items()}}
        whole[index] = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in state.items()}
    return whole


def checked_states(
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    weights: Mapping[torch.Tensor, PrimaryWeight],
    shard: dict[str, int] | None,
) -> tuple[list[tuple[PrimaryWeight, torch.Tensor]], dict[int, dict[str, Any]]]:
    """Return ((weight, loaded master) pairs, states of the wrapped optimizer), of both this rank's shard.

    shard: this rank and the number of ranks, None if masters are not split.
    Raises ValueError for another rank's part, or masters of other shapes.
    """
    saved_by = state_dict.get("shard")
    if saved_by is not None and saved_by != shard:
        raise ValueError(
            f"{NAME}: the state dict is the shard of rank {saved_by['rank']} of {saved_by['ranks']}, but this is "
            + (f"rank {shard['rank']} of {shard['ranks']}" if shard else "an optimizer with whole masters")
            + "; save full_state_dict() to load it elsewhere"
        )
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    of_index = dict(zip(indices, (p for group in groups for p in group["params"])))
    masters, states = [], {}
    for index, state in state_dict["state"].items():
        parameter = of_index.get(index)
        weight = None if parameter is None else weights.get(parameter)
        if parameter is not None:
            state = {key: _placed_as(parameter, value) for key, value in state.items()}
        if weight is not None:
            state = _own_part(weight, state, is_part=saved_by is not None)
            master = state.pop(MASTER, None)
            if master is not None:
                masters.append((weight, master))
        if state or weight is None:
            states[index] = state
    return masters, states


def _own_part(weight: PrimaryWeight, state: dict[str, Any], is_part: bool) -> dict[str, Any]:
    """Return this rank's shard of the states of `weight`, which are unsharded or, if `is_part`, its shard already."""
    whole, master = weight.weight.shape, state.get(MASTER)
    # torch.distributed.checkpoint drops the record of the rank.
    wanted = weight.master.shape if is_part else whole
    if master is not None and master.shape != wanted:
        raise ValueError(
            f"{NAME}: the master of {weight.name} must have shape {list(wanted)}, got {list(master.shape)}; load the "
            "full_state_dict() of the same model"
        )
    if is_part or not weight.is_split:
        return state
    return {key: weight.part(x).clone() if getattr(x, "shape", None) == whole else x for key, x in state.items()}


def _placed_as(like: torch.Tensor, x: Any) -> Any:
    """Return `x`, equal on all ranks, distributed as `like` if that is a DTensor of the same shape."""
    if not hasattr(like, "placements") or hasattr(x, "placements") or getattr(x, "shape", None) != like.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
