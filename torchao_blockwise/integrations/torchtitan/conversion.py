"""Conversion of a torchtitan model: built on the meta device, before it is parallelized and initialized."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.integrations.options import Options
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.tensors import MasterWeightTensor


def built_converted(config: Any, options: Options) -> Any:
    """Make `config`, the config of a whole model, build a converted model; in place, and returned.

    In place because torchtitan's trainer builds the object that it had before overrides.
    """
    config.__class__ = _config_class(type(config), options)
    return config


def _config_class(kind: Any, options: Options) -> Any:
    """A class derived from the config class `kind`, under its name, that builds what it builds, converted."""

    def build(self: Any, **kwargs: Any) -> nn.Module:
        model = kind.build(self, **kwargs)
        options.convert(model)
        kind_of_model: Any = type(model)
        model.__class__ = _checking(kind_of_model)
        return model

    return _derived(kind, __slots__=(), build=build)


@functools.cache
def _checking(kind: Any) -> Any:
    """A class derived from the model class `kind`, under its name, that refuses shards which cut blocks."""

    def parallelize(self: Any, parallel_dims: Any) -> None:
        weights = {name: p for name, p in self.named_parameters() if isinstance(p, MasterWeightTensor)}
        whole = {name: p.shape for name, p in weights.items()}
        if whole and parallel_dims.spmd_backend == "spmd_types" and (parallel_dims.tp > 1 or parallel_dims.ep > 1):
            raise ValueError(
                f"{next(iter(whole))}: converted weights are split over ranks as DTensors, got the spmd_types backend "
                "with tensor or expert parallelism; use --parallelism.spmd_backend partial_dtensor"
            )
        kind.parallelize(self, parallel_dims)
        for fqn, module in self.named_modules():
            for name, p in _compat.parameters_of(module).items():
                full_name = f"{fqn}.{name}".lstrip(".")
                if full_name in whole:
                    _check_shard(full_name, p, whole[full_name], own_products=isinstance(module, ConvertedLinear))

    return _derived(kind, parallelize=parallelize)


def _derived(kind: Any, **members: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, **members})


def _check_shard(name: str, p: Any, whole: Any, own_products: bool) -> None:
    """Refuse a shard of a weight that was `whole` where it cuts blocks, or where a scale of the whole is missing.

    own_products: whether the layer hands the DTensor to `linear`, which asks all ranks for the largest value.
    """
    local: Any = _compat.local_of(p)
    fmt = local.config.weight_format
    for dim, what in ((-2, "rows"), (-1, "columns")):
        have, block = local.shape[dim], fmt.block[dim]
        if have != whole[dim] and have % block:
            raise ValueError(
                f"{name}: tensor parallelism leaves a rank {have} of {whole[dim]} {what}, which cuts a block of "
                f"{block}; use fewer ranks, or exclude the layer"
            )
        if have != whole[dim] and fmt.has_global_scale and not own_products:
            raise ValueError(
                f"{name}: {fmt.name} scales by the largest value of the whole weight, got {have} of its {whole[dim]} "
                f"{what} on a rank in a layer that multiplies by its local part; exclude the layer, or take fp8"
            )
