"""Helpers that the integrations share: recipes by name, and conversion."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import conversion
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.conversion import conversion_report, load_recipe_state, recipe_state, recommended_layers
from torchao_blockwise.tensors import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, TrainingConfig
from torchao_blockwise.tensors.config import check_config

RECIPES: dict[str, type[TrainingConfig]] = {"fp8": BlockwiseFP8TrainingConfig, "nvfp4": NVFP4TrainingConfig}


def resume_recipe(model: nn.Module, saved: Mapping[str, Mapping[str, int]]) -> None:
    """Load a `recipe_state` that one rank saved for all: each rank keeps its seed and takes the number of draws."""
    own = recipe_state(model)
    load_recipe_state(model, {name: {**state, "seed": own.get(name, state)["seed"]} for name, state in saved.items()})


def nearest(what: str, name: object, known: Iterable[str]) -> str:
    """Return a message about an unknown name, with the known names and the most similar one."""
    known = list(known)
    return f"{what} must be one of {known}, got {name!r}{did_you_mean(name, known)}"


def config_of(kind: type[TrainingConfig], options: Mapping[str, Any]) -> TrainingConfig:
    """Return `kind(**options)`; `out_dtype` may be the name of a dtype, such as "bfloat16"."""
    dtype = options.get("out_dtype")
    if isinstance(dtype, str):
        options = {**options, "out_dtype": getattr(torch, dtype.removeprefix("torch."), dtype)}
    return kind(**options)


def training_config(recipe: str | TrainingConfig) -> TrainingConfig:
    """Return the default config for the name of a recipe, "fp8" or "nvfp4"; a config is returned unchanged.

    Raises ValueError for another name, TypeError for another type.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(nearest("recipe", recipe, RECIPES))
        return RECIPES[recipe]()
    check_config(f"a recipe is one of {list(RECIPES)}, or a config", recipe)
    return recipe


def convert(
    model: nn.Module,
    config: TrainingConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    fuse: bool = True,
) -> nn.Module:
    """Call `quantize_(model, config, filter_fn)` and `fuse(model)`, log the result, and return `model`.

    filter_fn: default `recommended_layers(model, config)`. fuse: whether to call `fuse(model)`.
    Raises ValueError if no layer is converted.
    """
    with warnings.catch_warnings():
        # Below, an error is raised instead.
        warnings.filterwarnings("ignore", message="quantize_: no layer of")
        quantize_(model, config, filter_fn=filter_fn or recommended_layers(model, config))
    report = conversion_report(model)
    if not report.totals["converted"]:
        raise ValueError(
            f"{type(model).__name__}: none of the {report.totals['layers']} linear layers and experts was "
            f"converted; widen the filter, or train the model without a recipe\n{report}"
        )
    fusion = conversion.fuse(model) if fuse else conversion.fusion_report(model)
    logging.getLogger(__name__).info("Converted by torchao_blockwise:\n%s\n%s", report, fusion)
    return model
