"""Shared by the files of frameworks: recipes by name, a conversion that must find something, and a scope."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise._names import did_you_mean
from torchao_blockwise.conversion import (
    conversion_report,
    fuse,
    load_recipe_state,
    recipe_state,
    recommended_layers,
)
from torchao_blockwise.tensors import (
    BlockwiseFP8TrainingConfig,
    NVFP4TrainingConfig,
    TrainingConfig,
    weights_unchanged,
)
from torchao_blockwise.tensors.config import check_config

RECIPES: dict[str, type[TrainingConfig]] = {"fp8": BlockwiseFP8TrainingConfig, "nvfp4": NVFP4TrainingConfig}


def resume_recipe(model: nn.Module, saved: Mapping[str, Mapping[str, int]]) -> None:
    """`load_recipe_state` of what one rank has saved for all: each keeps its seed, and all have drawn as often."""
    own = recipe_state(model)
    load_recipe_state(model, {name: {**state, "seed": own.get(name, state)["seed"]} for name, state in saved.items()})


def nearest(what: str, name: object, known: Iterable[str]) -> str:
    """A sentence about an unknown name: what there is, and which of it is spelled nearly so."""
    known = list(known)
    return f"{what} must be one of {known}, got {name!r}{did_you_mean(name, known)}"


def config_of(kind: type[TrainingConfig], options: Mapping[str, Any]) -> TrainingConfig:
    """`kind(**options)`, where `out_dtype` may be a name, as JSON has it: "bfloat16"."""
    dtype = options.get("out_dtype")
    if isinstance(dtype, str):
        options = {**options, "out_dtype": getattr(torch, dtype.removeprefix("torch."), dtype)}
    return kind(**options)


def training_config(recipe: str | TrainingConfig) -> TrainingConfig:
    """The config of a recipe's name, "fp8" or "nvfp4", with its defaults; a config is returned as it is.

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
    fused: bool = False,
) -> nn.Module:
    """`quantize_(model, config, filter_fn)`, in place; returns `model`.

    filter_fn: default `recommended_layers(model, config)`.
    fused: whether `fuse(model)` is called, too.
    Raises ValueError if that converts nothing.
    """
    with warnings.catch_warnings():
        # It is an error here.
        warnings.filterwarnings("ignore", message="quantize_: nothing of")
        quantize_(model, config, filter_fn=filter_fn or recommended_layers(model, config))
    report = conversion_report(model)
    if not report.totals["converted"]:
        raise ValueError(
            f"{type(model).__name__}: no layer was converted, of {report.totals['layers']} linear layers and experts; "
            f"widen the filter, or train it without a recipe\n{report}"
        )
    if fused:
        fuse(model)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether a layer of `model` is converted."""
    return conversion_report(model).totals["converted"] > 0


class OpenScope:
    """A `weights_unchanged` that callbacks enter and leave: `enter` again and `leave` again do nothing."""

    def __init__(self, keep: str) -> None:
        self._keep = keep
        self._scope: contextlib.AbstractContextManager[object] | None = None

    def enter(self, model: nn.Module) -> None:
        if self._scope is None:
            scope = weights_unchanged(model, keep=self._keep)
            scope.__enter__()
            self._scope = scope

    def leave(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)
