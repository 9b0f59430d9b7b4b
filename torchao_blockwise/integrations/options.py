"""Options of a conversion as JSON has them: fields of a training config and of `Selection`."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from torchao_blockwise._names import did_you_mean
from torchao_blockwise.conversion import Filter, conversion_report, experts, is_linear, min_features, skip_fqns
from torchao_blockwise.conversion.recommended import recommended
from torchao_blockwise.integrations.recipes import RECIPES, config_of, convert, nearest
from torchao_blockwise.tensors import TrainingConfig
from torchao_blockwise.tensors.config import without_removed


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which of the `recommended_layers` are converted, and which others.

    include, exclude: patterns of fully qualified names, as `fnmatch` has them: "layers.0.*", "*.wo". A layer is
        converted if one of `include` matches and none of `exclude` does. A pattern that matches nothing is an error.
    experts: also weights of experts. lm_head: also output heads. Routers are never converted.
    min_features: leave out layers that are smaller in one dim.
    keep_last_blocks: how many of the last blocks to leave in high precision, or which share of them, as 0.15; None is
        what the recipe says, 15 % in NVFP4, none in FP8.
    fuse: let layers that read one activation share its quantized copies; see `fuse`.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    experts: bool = True
    lm_head: bool = False
    min_features: int = 0
    keep_last_blocks: int | float | None = None
    fuse: bool = False

    def __post_init__(self) -> None:
        for option in ("include", "exclude"):
            if isinstance(getattr(self, option), str):
                raise TypeError(f"{option}: must be a list of patterns, got {getattr(self, option)!r}; write [...]")

    def filter_for(self, model: nn.Module, config: TrainingConfig) -> Filter:
        """The filter of `quantize_(model, config)`; raises ValueError for patterns that match none of its layers."""
        names = [fqn for fqn, module in model.named_modules() if (is_linear() | experts()).is_about(module)]
        for pattern in (*self.include, *self.exclude):
            if not fnmatch.filter(names, pattern):
                # One name for each kind of layer.
                kinds = {".".join(part for part in name.split(".") if not part.isdigit()): name for name in names}
                raise ValueError(
                    f"pattern {pattern!r} matches no linear layer and no experts of this model; layers are called "
                    f"{', '.join(map(repr, kinds.values()))}; fix the pattern or leave it out"
                )

        def why_not_included(module: nn.Module, fqn: str) -> str | None:
            return None if any(fnmatch.fnmatchcase(fqn, p) for p in self.include) else "include: no pattern matches"

        chosen = recommended(model, config, heads=self.lm_head, last_blocks=self.keep_last_blocks)
        chosen &= Filter(why_not_included, f"include{self.include!r}")
        chosen = chosen & skip_fqns(*self.exclude) & min_features(self.min_features)
        return chosen if self.experts else chosen & is_linear()


def parse(recipe: str, given: Mapping[str, Any]) -> tuple[TrainingConfig, Selection]:
    """The training config and the selection of these options; recipe: "fp8" or "nvfp4".

    Trainers step master weights, so `master_weights` is not an option.
    Raises ValueError for a name that is none of them, and as both do for values; TypeError for a wrong type.
    """
    if recipe not in RECIPES:
        raise ValueError(nearest("format", recipe, RECIPES))
    given = without_removed(recipe, given)
    selection = {field.name for field in fields(Selection)}
    names = sorted(selection | {field.name for field in fields(RECIPES[recipe])} - {"master_weights"})
    for name in given:
        if name not in names:
            remedy = did_you_mean(name, names) or "; leave it out"
            raise ValueError(f"{recipe}: options are {', '.join(names)}; got {name!r}{remedy}")
    of_config = {name: value for name, value in given.items() if name not in selection}
    chosen: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if name in selection
    }
    return config_of(RECIPES[recipe], of_config), Selection(**chosen)


def convert_selected(model: nn.Module, config: TrainingConfig, selection: Selection) -> None:
    """Convert what is selected of `model`, in place; the report goes to the log.

    Raises ValueError where nothing is selected, and as `Selection.filter_for` and `quantize_` do.
    """
    convert(model, config, selection.filter_for(model, config), fused=selection.fuse)
    logging.getLogger().info(f"Converted by torchao_blockwise:\n{conversion_report(model)}")
