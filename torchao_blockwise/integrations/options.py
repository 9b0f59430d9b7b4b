"""Options of a conversion as a JSON object: the fields of a training config and of `Selection`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from torchao_blockwise._names import did_you_mean
from torchao_blockwise.conversion import Filter, custom, experts, is_linear, min_features, skip_fqns
from torchao_blockwise.conversion.default_filter import recommended
from torchao_blockwise.integrations.recipes import RECIPES, config_of, nearest
from torchao_blockwise.tensors import TrainingConfig
from torchao_blockwise.tensors.config import without_removed


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The layers to convert, starting from `recommended_layers`.

    include, exclude: `fnmatch` patterns of fully qualified names, such as "layers.0.*" or "*.wo". A layer is converted
        if at least one pattern of `include` and none of `exclude` matches. A pattern that matches nothing is an error.
    experts: whether to convert weights of experts. lm_head: whether to convert output heads and other layers outside of
        the blocks. Routers are never converted.
    min_features: leave out layers with fewer in_features or out_features.
    keep_last_blocks: the number of blocks at the end of each tower to leave in high precision, or their share; None is
        the default of the recipe: 15 % in NVFP4, none in FP8.
    fuse: let layers that read the same input share its quantized copies; see `torchao_blockwise.fuse`.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    experts: bool = True
    lm_head: bool = False
    min_features: int = 0
    keep_last_blocks: int | float | None = None
    fuse: bool = True

    def __post_init__(self) -> None:
        for option in ("include", "exclude"):
            if isinstance(getattr(self, option), str):
                raise TypeError(f"{option}: must be a list of patterns, got {getattr(self, option)!r}; write [...]")

    def filter_for(self, model: nn.Module, config: TrainingConfig) -> Filter:
        """Return the filter for `quantize_(model, config)`; raise ValueError for patterns that match no layer."""
        names = [fqn for fqn, module in model.named_modules() if (is_linear() | experts()).is_about(module)]
        for pattern in (*self.include, *self.exclude):
            if not fnmatch.filter(names, pattern):
                # One example for each name without numbers.
                kinds = {".".join(part for part in name.split(".") if not part.isdigit()): name for name in names}
                raise ValueError(
                    f"pattern {pattern!r} matches no linear layer and no experts of this model; names of layers are "
                    f"{', '.join(map(repr, kinds.values()))}; fix the pattern or leave it out"
                )

        chosen = recommended(model, config, heads=self.lm_head, last_blocks=self.keep_last_blocks)
        is_included = lambda module, fqn: any(fnmatch.fnmatchcase(fqn, p) for p in self.include)  # noqa: E731
        chosen &= custom(is_included, "include: no pattern matches")
        chosen = chosen & skip_fqns(*self.exclude) & min_features(self.min_features)
        return chosen if self.experts else chosen & is_linear()


def parse(recipe: str, given: Mapping[str, Any]) -> tuple[TrainingConfig, Selection]:
    """Return the training config and the selection for these options. recipe: "fp8" or "nvfp4".

    `master_weights` is not an option, since trainers update master weights.
    Raises ValueError for an unknown option and for invalid values, TypeError for a wrong type.
    """
    if recipe not in RECIPES:
        raise ValueError(nearest("format", recipe, RECIPES))
    given = without_removed(recipe, given)
    selection = {field.name for field in fields(Selection)}
    names = sorted(selection | {field.name for field in fields(RECIPES[recipe])} - {"master_weights"})
    for name in given:
        if name not in names:
            meant = "" if name == "master_weights" else did_you_mean(name, names)
            raise ValueError(f"{recipe}: options are {', '.join(names)}; got {name!r}{meant or '; leave it out'}")
    of_config = {name: value for name, value in given.items() if name not in selection}
    chosen: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if name in selection
    }
    return config_of(RECIPES[recipe], of_config), Selection(**chosen)
