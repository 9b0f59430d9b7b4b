"""The layers that a monitor observes, the recipes that it tries, and the lookup of the layer that owns a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.conversion.weights import weights_of
from torchao_blockwise.nn.gemms import WHOLE, AmaxGroups
from torchao_blockwise.nn.sharded_linear import contiguous_dtensor, starts_of
from torchao_blockwise.nn.weights import WEIGHTS, config_of
from torchao_blockwise.tensors import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4TrainingConfig,
    QuantizedTensor,
    TrainingConfig,
    TransposedWeight,
)
from torchao_blockwise.tensors.weight_operands import group_names

RECIPES: dict[str, TrainingConfig] = {
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8_pow2": BlockwiseFP8TrainingConfig(power_of_2_scales=True),
    "fp8_1x128": BlockwiseFP8TrainingConfig(grad_weight_blocks="1x128"),
    "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
}


@dataclass(frozen=True)
class Layer:
    """A linear layer, or one weight of experts.

    name: the name of the layer, or of the weight ("layers.0.experts.down"). parameter: the weight's name in `module`.
    """

    name: str
    module: nn.Module
    parameter: str

    @property
    def weight(self) -> Any:
        """The current Parameter, which FSDP2 replaces by the gathered one during a pass."""
        return _compat.parameters_of(self.module)[self.parameter]

    @property
    def config(self) -> TrainingConfig | None:
        """The config of the layer, None if it is not converted."""
        local = _compat.local_of(self.weight)
        return config_of(local) if isinstance(local, WEIGHTS) else None


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the linear layers and weights of experts. If layers share a weight, only the first one is returned."""
    found: dict[int, Layer] = {}
    for fqn, module in model.named_modules():
        for name, weight in weights_of(module).items():
            layer = fqn if isinstance(module, nn.Linear) else f"{fqn}.{name}".lstrip(".")
            # A parametrized or pruned weight is not a Parameter.
            if weight is not None:
                found.setdefault(id(weight), Layer(layer, module, name))
    return list(found.values())


def recipe_name(config: TrainingConfig) -> str:
    """Return the name of the known recipe that quantizes as `config` does, else the name of its class."""

    def cast(config: TrainingConfig) -> tuple[Any, ...]:
        return config.activation_format, config.grad_weight_format, config.weight_format, config.power_of_2_scales

    return next((name for name, known in RECIPES.items() if cast(known) == cast(config)), type(config).__name__)


def untransformed(config: TrainingConfig) -> TrainingConfig:
    """Return the config without a random Hadamard transform: figures describe tensors, not their transforms."""
    return replace(config, hadamard=False) if config.hadamard_number else config  # type: ignore[call-arg]  # NVFP4


def find_recipes(what_if: Iterable[str | TrainingConfig]) -> dict[str, TrainingConfig]:
    """Return recipes by name, from names and configs."""
    found: dict[str, TrainingConfig] = {}
    for recipe in [what_if] if isinstance(what_if, (str, TrainingConfig)) else what_if:
        if isinstance(recipe, str) and recipe not in RECIPES:
            known = ", ".join(RECIPES)
            raise ValueError(f"NumericsMonitor: what_if must name recipes of {known}, or hold configs, got {recipe!r}")
        config = RECIPES[recipe] if isinstance(recipe, str) else recipe
        found[recipe_name(config)] = config
    return found


def layer_of(weight: Any, layers: Sequence[Layer]) -> Layer | None:
    """Return the layer that has the values of `weight`, or whose experts include them; None if there is none.

    It is found by the address of the values, since GEMMs read views, casts and parts of weights.
    """
    address = _values_of(weight).data_ptr()
    for layer in layers:
        values = _values_of(_compat.local_of(layer.weight))
        start = values.data_ptr()
        # Values that are not gathered yet have no address.
        if start and start <= address < start + values.numel() * values.element_size():
            return layer
    return None


def _values_of(weight: Any) -> torch.Tensor:
    if isinstance(weight, TransposedWeight):
        weight = weight.weight
    if isinstance(weight, MasterWeightTensor):
        return weight.source[0]
    return weight.qdata if isinstance(weight, QuantizedTensor) else weight


@dataclass(frozen=True)
class Place:
    """The position of a rank's part of a layer under tensor or expert parallelism.

    split: the process groups over which x, the weight and the gradient are split.
    counts_x, counts_gradient: whether this rank counts them; replicated tensors are counted by the first rank only.
    first: the first row (expert, for three dims) and the first column of the weight on this rank.
    """

    split: AmaxGroups = WHOLE
    counts_x: bool = True
    counts_gradient: bool = True
    first: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, weight: Any) -> Place:
        """Return the place of `weight` during a forward pass; a plain tensor is not split."""
        if _compat.local_of(weight) is weight:
            return cls()
        rows, columns = shards_of(weight, 0), shards_of(weight, weight.dim() - 1)
        starts = starts_of(weight.shape, weight.device_mesh, weight.placements)
        first = starts[0], starts[-1]
        if weight.dim() == 3:
            return cls(first=first)
        coordinate = weight.device_mesh.get_coordinate()
        groups = [group_names([weight.device_mesh.get_group(i) for i in dims]) for dims in (columns, rows)]
        split = AmaxGroups(x=groups[0], grad_output=groups[1])
        return cls(split, not any(coordinate[i] for i in rows), not any(coordinate[i] for i in columns), first)


def shards_of(weight: Any, dim: int) -> list[int]:
    """Return the dims of the mesh over which dim `dim` of a DTensor is split."""
    return [i for i, placement in enumerate(weight.placements) if placement.is_shard(dim)]


def own_experts(weight: Any) -> list[int]:
    """Return the dims of the mesh over which experts [E, N, K] are split by expert only, else []."""
    if _compat.local_of(weight) is weight or weight.dim() != 3:
        return []
    split = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    return split if split == shards_of(weight, 0) else []


def part_of(weight: Any) -> tuple[int, ...]:
    """Return which part of `weight` `values_of_weight` returns; it is equal on ranks with the same values."""
    return tuple(weight.device_mesh.get_coordinate()[i] for i in own_experts(weight))


def values_of_weight(weight: Any) -> tuple[torch.Tensor | None, str]:
    """Return (high-precision values, process groups over which they are split) of a layer's weight; a collective.

    Values are gathered if necessary; only experts that are split over ranks are those of this rank. The values are None
    for a quantized weight whose master no optimizer has.
    """
    local = _compat.local_of(weight)
    if isinstance(local, QuantizedTensor):
        pending = local.pending_master if local is weight else None
        return (None if pending is None else pending.master(local)), ""
    values = local.hp if isinstance(local, MasterWeightTensor) else local.detach()
    if local is weight:
        return values, ""
    mesh, experts = weight.device_mesh, own_experts(weight)
    if experts:
        return values, group_names([mesh.get_group(i) for i in experts])
    # This moves offloaded values to the device of the mesh.
    return contiguous_dtensor(values, mesh, weight.placements, weight.shape).full_tensor(), ""
