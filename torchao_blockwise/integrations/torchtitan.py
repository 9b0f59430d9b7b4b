"""torchtitan 0.3 or newer: one command-line option makes it build converted models.

    --override.imports torchao_blockwise.integrations.torchtitan.fp8
    --override.imports 'torchao_blockwise.integrations.torchtitan.nvfp4={"keep_last_blocks": 2}'

In a config, use `model_registry(flavor, converters=[BlockwiseConverter.Config(format="fp8", options={...})])`. The
options are the fields of `Selection` and of the training config; docs/integrations.md describes them. A model is built
and converted on the meta device, before it is parallelized and initialized.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
    from torchtitan.protocols.model import BaseModel
except ImportError as e:
    raise ImportError(
        "torchao_blockwise.integrations.torchtitan needs torchtitan 0.3 and a PyTorch that supports it, but an "
        f"import failed ({e}); pip install -U torchtitan torch"
    ) from e

from torchao_blockwise import _compat
from torchao_blockwise.conversion.weights import held_parameters
from torchao_blockwise.integrations.options import parse
from torchao_blockwise.integrations.recipes import convert
from torchao_blockwise.nn import sac_save_list
from torchao_blockwise.nn.converted import KNOWN_FORWARDS, ConvertedLinear
from torchao_blockwise.tensors import MasterWeightTensor

# It calls `F.linear` with its weight, or with this rank's shard of it.
KNOWN_FORWARDS.add(ScaledBiasRowwiseLinear.forward)


# These override the config of the whole model, since factories of layers do not see names. torchtitan identifies
# overrides by the modules of their functions.
@override(target=BaseModel.Config, description="blockwise FP8")
def fp8(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """Build the model converted to blockwise FP8. options: see `options.parse`."""
    return _built_converted(config, "fp8", options)


@override(target=BaseModel.Config, description="NVFP4")
def nvfp4(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """Build the model converted to NVFP4. options: see `options.parse`."""
    return _built_converted(config, "nvfp4", options)


class BlockwiseConverter(QuantizationConverter):
    """A converter for `model_registry(flavor, converters=[BlockwiseConverter.Config(...)])`."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """format: "fp8" or "nvfp4". options: see `options.parse`."""

        format: str = "fp8"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        return _built_converted(model_config, self.config.format, self.config.options)


class SelectiveACWithGemms(SelectiveAC):
    """Selective activation checkpointing that also saves the results of GEMMs of converted layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | set(sac_save_list())


@override(target=SelectiveAC.Config, exact=True, description="saves GEMMs of converted layers")
def selective_ac(config: SelectiveAC.Config) -> SelectiveACWithGemms.Config:
    """Make selective activation checkpointing save the results of GEMMs, so that backward does not recompute them."""
    return derive(config, SelectiveACWithGemms.Config)


def _built_converted(config: Any, format: str, options: Mapping[str, Any]) -> Any:
    """Change `config`, the config of a model, so that it builds a converted model; in place, and return it.

    It works in place because torchtitan's trainer builds from the object that it had before overrides.
    """
    kind = type(config)
    recipe, selection = parse(format, options)

    def build(self: Any, **kwargs: Any) -> nn.Module:
        model = kind.build(self, **kwargs)
        convert(model, recipe, selection.filter_for(model, recipe), selection.fuse)
        model.parallelize = types.MethodType(_parallelize, model)
        return model

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    config.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "build": build, **names})
    return config


def _parallelize(model: Any, parallel_dims: Any) -> None:
    """Call the method of the model's class, and raise ValueError for shards that cannot train."""
    whole = {name: p.shape for name, p in model.named_parameters() if isinstance(p, MasterWeightTensor)}
    if whole and parallel_dims.spmd_backend == "spmd_types" and (parallel_dims.tp > 1 or parallel_dims.ep > 1):
        raise ValueError(
            f"{next(iter(whole))}: converted weights must be sharded as DTensors, got the spmd_types backend with "
            "tensor or expert parallelism; use --parallelism.spmd_backend partial_dtensor"
        )
    type(model).parallelize(model, parallel_dims)
    for p, holders in held_parameters(model).items():
        name, module = holders[0]
        # Linear layers check their shards themselves, and their tensor scale covers all ranks.
        if name not in whole or isinstance(module, ConvertedLinear):
            continue
        local: Any = _compat.local_of(p)
        fmt = local.fmt
        for dim, what in ((-2, "rows"), (-1, "columns")):
            have, every, block = local.shape[dim], whole[name][dim], fmt.block[dim]
            why = f"cuts a block of {block}; use fewer ranks" if have % block else ""
            if fmt.has_global_scale:
                why = f"lacks the amax of the whole weight, by which {fmt.name} scales; use fp8"
            if have != every and why:
                raise ValueError(
                    f"{name}: tensor parallelism gives a rank {have} of {every} {what}, which {why}, or exclude the "
                    "layer"
                )
