"""State dicts of `MasterWeightOptimizer`: a master among the states of its parameter, whole or a rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise.distributed.zero.weights import PrimaryWeight, gather_parts

# The key of a master among the states of its parameter.
MASTER = "master"


def whole_states(
    states: Mapping[int, dict[str, Any]],
    parameters: Sequence[torch.Tensor],
    weights: Mapping[torch.Tensor, PrimaryWeight],
    group: dist.ProcessGroup | None,
) -> dict[int, dict[str, Any]]:
    """The states of all ranks, by the index of their parameter; a collective where states are split."""
    whole = {}
    for index, state in states.items():
        weight = weights.get(parameters[index])
        if weight is not None:
            split = {key: x for key, x in state.items() if getattr(x, "shape", None) == weight.master.shape}
            state = {**state, **{key: gather_parts(weight, x, group) for key, x in split.items()}}
        whole[index] = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in state.items()}
    return whole


def checked_states(
    name: str,
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    weights: Mapping[torch.Tensor, PrimaryWeight],
    shard: dict[str, int] | None,
) -> tuple[list[tuple[PrimaryWeight, torch.Tensor]], dict[int, dict[str, Any]]]:
    """(weights with masters of their shape, states of the wrapped optimizer), this rank's part of whole ones.

    name: of the optimizer, for errors. shard: which part this rank has, None if it has all.
    Raises ValueError for another rank's part, or masters of other shapes.
    """
    saved_by = state_dict.get("shard")
    if saved_by is not None and saved_by != shard:
        raise ValueError(
            f"{name}: the state dict is the part of rank {saved_by['rank']} of {saved_by['ranks']}, this is "
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
            state = _own_part(name, weight, state, is_part=saved_by is not None)
            master = state.pop(MASTER, None)
            if master is not None:
                masters.append((weight, master))
        if state or weight is None:
            states[index] = state
    return masters, states


def _own_part(name: str, weight: PrimaryWeight, state: dict[str, Any], is_part: bool) -> dict[str, Any]:
    """What this rank has of the states of `weight`, which are whole ones, or, if `is_part`, its own already."""
    whole, split = weight.weight.shape, weight.is_split
    if split and not is_part and getattr(state.get(MASTER), "ndim", 0) == 1:
        # What torch.distributed.checkpoint makes of plain tensors.
        raise ValueError(
            f"{name}: the master of {weight.name} is a rank's part, of a state dict that does not say whose; save "
            "full_state_dict()"
        )
    if split:
        state = {
            key: weight.part(value).clone() if getattr(value, "shape", None) == whole else value
            for key, value in state.items()
        }
    master = state.get(MASTER)
    if master is not None and master.shape != weight.master.shape:
        raise ValueError(
            f"{name}: the master of {weight.name} must have shape {list(whole)}"
            + f" or {list(weight.master.shape)}" * split
            + f", got {list(master.shape)}; load the state of the same model"
        )
    return state


def _placed_as(like: torch.Tensor, x: Any) -> Any:
    """`x`, if it is whole and `like` a DTensor of its shape, placed as that; all ranks have the same `x`."""
    if not hasattr(like, "placements") or hasattr(x, "placements") or getattr(x, "shape", None) != like.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
