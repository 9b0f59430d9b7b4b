"""Weights that share one tensor scale while they train, because inference engines run them as one.

An engine concatenates the weights of q, k and v, or of gate and up, and keeps one tensor scale for all of them. Weights
that trained with it are served as they trained: none is rounded a second time.

    q ─ amax ─┐
    k ─ amax ─┼─ max ─▶ the tensor scale of q, of k and of v
    v ─ amax ─┘

Nothing is kept: whoever quantizes a weight of a group asks for the values that the others have at that time. So a group
knows its members by where modules hold them, which moves, loads, shards and copies of a model leave as it is.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchao_blockwise import _compat, ops
from torchao_blockwise.ops.quantization import tensor_amax_bits_op

# What engines concatenate, by the last parts of names.
FUSED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_EXPERT = re.compile(r"\bexperts\.\d+\.")
# Of a module: {name of a Parameter: its group}. Copied and pickled with the module.
_ATTRIBUTE = "_scale_groups"


def scale_group_name(name: str, groups: bool | tuple[tuple[str, ...], ...] = True) -> str:
    """What the weight `name` has in common with those that share its tensor scale; its own name if none does.

    groups: as `NVFP4TrainingConfig.scale_groups`. Experts that are modules of a list count as one weight.
    """
    if groups is False:
        return name
    fused = FUSED_BY_ENGINES if groups is True else groups
    name = _EXPERT.sub("experts.*.", name)
    path, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{path}.{'+'.join(names)}".lstrip(".") for names in fused if last in names), name)


class ScaleGroup:
    """The weights of one model that share a tensor scale, by the modules that hold them.

    name: what their names have in common; see `scale_group_name`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._members: list[tuple[weakref.ref[nn.Module], str]] = []
        _groups.add(self)

    def join(self, module: nn.Module, name: str) -> None:
        """Have the Parameter that `module` holds as `name` share the tensor scale."""
        joined = vars(module).setdefault(_ATTRIBUTE, {})
        if joined.get(name) is not self:
            joined[name] = self
            self._members.append((weakref.ref(module), name))
            _by_values.clear()

    def weights(self) -> list[Any]:
        """What the modules hold now, each once: Parameters, or what the program has put in their places."""
        found: dict[int, Any] = {}
        for reference, name in self._members:
            module = reference()
            if module is not None and group_in(module, name) is self:
                weight = _compat.parameters_of(module).get(name)
                found[id(weight)] = weight
        return [weight for weight in found.values() if weight is not None]

    def values(self) -> Iterator[torch.Tensor]:
        """The values of its master weights, or the parts of them that this rank holds."""
        for weight in self.weights():
            hp = getattr(_compat.local_of(weight), "hp", None)
            if isinstance(hp, torch.Tensor):
                yield hp

    def check_split(self, amax_groups: str) -> None:
        """Raise ValueError if ranks split a member that they do not split over `amax_groups`."""
        reduced = set(amax_groups.split(","))
        for weight in self.weights():
            if _compat.local_of(weight) is weight:
                continue
            split = [weight.device_mesh.get_group(i) for i, p in enumerate(weight.placements) if p.is_shard()]
            if not reduced.issuperset(group.group_name for group in split):
                raise ValueError(
                    f"scale_groups: {self.name} share a tensor scale, and ranks split some of them alone; parallelize "
                    "all of them alike, or convert with scale_groups=False"
                )

    def check_together(self, cast: int) -> None:
        """Raise ValueError if so many of its weights are all that one cast quantizes."""
        members = [weight for weight in self.weights() if hasattr(_compat.local_of(weight), "config")]
        if cast != len(members):
            raise ValueError(
                f"scale_groups: {len(members)} weights of {self.name} share a tensor scale, and {cast} of them are "
                "cast together; give all of them to one optimizer and one mesh, or convert with scale_groups=False"
            )

    def __getstate__(self) -> tuple[str, list[tuple[nn.Module, str]]]:
        members = [(reference(), name) for reference, name in self._members]
        return self.name, [(module, name) for module, name in members if module is not None]

    def __setstate__(self, state: tuple[str, list[tuple[nn.Module, str]]]) -> None:
        self.name, members = state
        self._members = [(weakref.ref(module), name) for module, name in members]
        _groups.add(self)
        _by_values.clear()


_groups: weakref.WeakSet[ScaleGroup] = weakref.WeakSet()
# The group, or None, of values that were asked about.
_by_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def group_in(module: nn.Module, name: str) -> ScaleGroup | None:
    """The group of the Parameter that `module` holds as `name`."""
    group: ScaleGroup | None = vars(module).get(_ATTRIBUTE, {}).get(name)
    return group


def groups_in(module: nn.Module) -> dict[str, ScaleGroup]:
    """Those of all Parameters of `module`, by name."""
    return dict(vars(module).get(_ATTRIBUTE, {}))


def leave_group(module: nn.Module, name: str) -> None:
    """Have the Parameter that `module` holds as `name` share no tensor scale any more."""
    joined = vars(module).get(_ATTRIBUTE, {})
    if joined.pop(name, None) is not None:
        _by_values.clear()
    if not joined:
        vars(module).pop(_ATTRIBUTE, None)


def groups_by_weight() -> dict[int, ScaleGroup]:
    """Of all groups {id of a weight, of a DTensor's part: the group}; for as long as the weights stay these objects."""
    return {id(_compat.local_of(weight)): group for group in _groups for weight in group.weights()}


def group_of(hp: torch.Tensor) -> ScaleGroup | None:
    """The group of the master weight that has these very values, or of a part of it."""
    if not _groups:
        return None
    if hp not in _by_values:
        # New values may be those of a member: a load or a move gives it others.
        _by_values[hp] = None
        for group in _groups:
            for values in group.values():
                _by_values[values] = group
    found: ScaleGroup | None = _by_values[hp]
    return found


def share_group(hp: torch.Tensor, copy: torch.Tensor) -> None:
    """Let `copy`, the values `hp` in another dtype, be quantized with the tensor scale of the group of `hp`, if any.

    For models that cast weights on every use. Not for what compilers trace, whose values are of no use.
    """
    if _groups and type(hp) is type(copy) is torch.Tensor and (group := group_of(hp)) is not None:
        _by_values[copy] = group


def shared_amax_bits(group: ScaleGroup, values: torch.Tensor) -> torch.Tensor:
    """The amax of a group, of which `values` are, or are rounded from, a member's; the bits of |fp32|, int32 []."""
    members = [*group.values()]
    bits = [tensor_amax_bits_op(x, None, False, ops.Backend.AUTO).to(values.device) for x in members]
    largest = torch.stack(bits).amax()
    if any(values is x for x in members):
        return largest
    # Rounding keeps the order, so the largest value rounded is the largest rounded value.
    return largest.view(torch.float32).to(values.dtype).float().view(torch.int32)
