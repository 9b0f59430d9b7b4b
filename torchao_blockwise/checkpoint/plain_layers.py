"""What of a model stays in high precision, as files name it: engines take all else for quantized.

They look a layer up by its name in the files, transformers by its own; both are given where they differ. All experts
of a layer are one module to them, whatever Parameters and names it is made of.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.checkpoint.names import all_parts_on_disk
from torchao_blockwise.conversion.weights import expert_weights
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.tensors.scale_groups import scale_group_name

_SHOWN = 3


def weights_of_embeddings(model: nn.Module) -> set[str]:
    """Parameters that embeddings look values up in, whatever layers share them."""
    own = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in own}


class PlainLayers(NamedTuple):
    """Names of linear layers, and of modules of experts."""

    linears: list[str]
    experts: list[str]

    @property
    def names(self) -> list[str]:
        return [*self.linears, *self.experts]


def plain_layers(model: nn.Module) -> PlainLayers:
    """The linear layers and modules of experts whose weights are not converted.

    Warns of layers that engines run as one, or of experts of one module, where some are converted and some are not:
    engines refuse them.
    """
    embeddings = {id(model.get_parameter(name)) for name in weights_of_embeddings(model)}
    linears = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    experts = {n: expert_weights(m) for n, m in model.named_modules()}
    plain = {n: weights for n, weights in experts.items() if weights and not any(map(_is_converted, weights.values()))}
    of_plain = {f"{module}.{own}".lstrip("."): w for module, weights in plain.items() for own, w in weights.items()}
    # Single experts of converted modules are many, and nobody asks for their names.
    parts = all_parts_on_disk(model, linears | of_plain)
    found = PlainLayers([], [])
    for name, weight in linears.items():
        if id(weight) in embeddings or not _is_converted(weight):
            found.linears.extend(_layers(parts[name][0].name, name))
    for module, weights in plain.items():
        on_disk = (_module_of(part.name) for own in weights for part in parts[f"{module}.{own}".lstrip(".")])
        found.experts.extend(dict.fromkeys((*on_disk, module)))
    mixed = _mixed((scale_group_name(parts[name][0].name), weight) for name, weight in linears.items())
    mixed += [n for n, weights in experts.items() if len(set(map(_is_converted, weights.values()))) > 1]
    if mixed:
        shown = ", ".join(mixed[:_SHOWN]) + (", .." if len(mixed) > _SHOWN else "")
        warnings.warn(
            f"export: engines run {shown} as one and want all of it quantized or nothing, but some weights are not "
            "converted; convert all (filter_fn), or none",
            stacklevel=4,
        )
    return found


def _layers(*weights: str) -> list[str]:
    """The layers of these names of a weight, each once."""
    return list(dict.fromkeys(name.removesuffix(".weight") for name in weights))


def _mixed(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The groups that have converted weights and others."""
    seen: dict[str, set[bool]] = {}
    for group, weight in weights:
        seen.setdefault(group, set()).add(_is_converted(weight))
    return [group for group, kinds in seen.items() if len(kinds) > 1]


def _is_converted(weight: torch.Tensor) -> bool:
    return isinstance(_compat.local_of(weight), (MasterWeightTensor, QuantizedTensor))


def _module_of(name: str) -> str:
    """Of a tensor of experts: `path` of path.3.up_proj.weight and of path.gate_up_proj."""
    return re.sub(r"(\.\d+)?\.[^.]+(\.weight)?$", "", name)
