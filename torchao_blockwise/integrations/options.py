"""Options of a conversion as JSON has them, what they say (a training config and a filter), and the conversion."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from torchao_blockwise._names import did_you_mean
from torchao_blockwise.conversion import (
    Filter,
    conversion_report,
    experts,
    is_linear,
    min_features,
    skip_fqns,
)
from torchao_blockwise.conversion.recommended import recommended
from torchao_blockwise.integrations.recipes import RECIPES, convert, nearest
from torchao_blockwise.tensors import TrainingConfig
from torchao_blockwise.tensors.config import without_removed

# Trainers make values after the conversion, and their optimizers step Parameters in high precision.
_NOT_OPTIONS = {"master_weights"}


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

    def filter_for(self, model: nn.Module, recipe: TrainingConfig) -> Filter:
        """The filter of `quantize_(model, recipe)`; raises ValueError for patterns that match none of its layers."""
        chosen = recommended(model, recipe, heads=self.lm_head, last_blocks=self.keep_last_blocks)
        if not self.experts:
            chosen &= is_linear()
        names = [fqn for fqn, module in model.named_modules() if is_linear()(module, fqn) or experts()(module, fqn)]
        for option in ("include", "exclude"):
            for pattern in getattr(self, option):
                if not fnmatch.filter(names, pattern):
                    raise ValueError(
                        f"{option}: pattern {pattern!r} matches no linear layer and no experts of this model; layers "
                        f"are called {_examples(names)}; mend the pattern or leave it out"
                    )
        if self.include != ("*",):
            chosen &= Filter(self._why_not_included, f"include{self.include!r}")
        if self.exclude:
            chosen &= skip_fqns(*self.exclude)
        if self.min_features:
            chosen &= min_features(self.min_features)
        return chosen

    def _why_not_included(self, module: nn.Module, fqn: str) -> str | None:
        return None if any(fnmatch.fnmatchcase(fqn, p) for p in self.include) else "include: no pattern matches"


def _examples(names: list[str]) -> str:
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), name)
    shown = [repr(name) for name in kinds.values()]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")


@dataclass(frozen=True)
class Options:
    """A training config, and which layers get it."""

    recipe: TrainingConfig
    selection: Selection = field(default_factory=Selection)

    @classmethod
    def of(cls, format: str, given: Mapping[str, Any]) -> Options:
        """`given`: fields of `Selection` and of the format's training config, as JSON has them.

        Raises ValueError for a name that is none of them, and as those two do; TypeError for a wrong type.
        """
        if format not in RECIPES:
            raise ValueError(nearest("format", format, RECIPES))
        given = without_removed(format, given)
        of_selection = {f.name: f for f in fields(Selection)}
        of_recipe = {f.name for f in fields(RECIPES[format])} - _NOT_OPTIONS
        for name in given:
            if name in _NOT_OPTIONS:
                raise ValueError(
                    f"{format}: trainers step master weights, which {name}=False would take away; leave it out"
                )
            if name not in of_selection.keys() | of_recipe:
                names = [*of_selection, *sorted(of_recipe)]
                remedy = did_you_mean(name, names) or "; leave it out"
                raise ValueError(f"{format}: options are {', '.join(names)}; got {name!r}{remedy}")
        selected = {name: _of_type(name, value) for name, value in given.items() if name in of_selection}
        recipe = {name: value for name, value in given.items() if name in of_recipe}
        if isinstance(recipe.get("out_dtype"), str):
            recipe["out_dtype"] = getattr(torch, recipe["out_dtype"], recipe["out_dtype"])
        return cls(RECIPES[format](**recipe), Selection(**selected))

    def convert(self, model: nn.Module) -> None:
        """Convert what is selected of `model`, in place; the report goes to the log.

        Raises ValueError where nothing is selected, and as `Selection.filter_for` and `quantize_` do.
        """
        convert(model, self.recipe, self.selection.filter_for(model, self.recipe), fused=self.selection.fuse)
        logging.getLogger().info(f"Converted by torchao_blockwise:\n{conversion_report(model)}")


def _of_type(name: str, value: Any) -> Any:
    wanted = int if name == "keep_last_blocks" else type(getattr(Selection, name))
    if wanted is tuple and isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value):
        return tuple(value)
    if type(value) is wanted and (wanted is not int or value >= 0):
        return value
    if name == "keep_last_blocks" and (value is None or type(value) is float):
        return value
    kinds = {tuple: "a list of patterns", bool: "true or false", int: "an integer, 0 or more"}
    raise TypeError(f"{name}: must be {kinds[wanted]}, got {value!r}")
