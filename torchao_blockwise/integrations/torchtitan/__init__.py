"""torchtitan from 0.3: its models are built converted, by one line on the command line.

    --override.imports torchao_blockwise.integrations.torchtitan.fp8
    --override.imports 'torchao_blockwise.integrations.torchtitan.nvfp4={"keep_last_blocks": 2}'

or in a config, `model_registry(flavor, converters=[BlockwiseConverter.Config(format="fp8", options={...})])`. The
options are the fields of `Selection` and those of the training config. docs/integrations.md has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
    from torchtitan.protocols.model import BaseModel
except ImportError as e:
    raise ImportError(
        "torchao_blockwise.integrations.torchtitan needs torchtitan 0.3 and a PyTorch that it runs on, and an import "
        f"failed ({e}); pip install -U torchtitan torch"
    ) from e

from torchao_blockwise.integrations.options import Options, Selection
from torchao_blockwise.integrations.torchtitan.conversion import built_converted
from torchao_blockwise.nn import sac_save_list
from torchao_blockwise.nn.converted import KNOWN_FORWARDS

__all__ = ["BlockwiseConverter", "Options", "Selection", "SelectiveACOfProducts", "fp8", "nvfp4", "selective_ac"]

# It calls `F.linear` with its weight, or with what this rank has of it.
KNOWN_FORWARDS.add(ScaledBiasRowwiseLinear.forward)


# A factory sees no names, so these take the whole model. torchtitan knows overrides by their functions' modules.
@override(target=BaseModel.Config, description="blockwise FP8")
def fp8(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """The model, built converted to blockwise FP8. options: as `Options.of` takes them."""
    return built_converted(config, Options.of("fp8", options))


@override(target=BaseModel.Config, description="NVFP4")
def nvfp4(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """The model, built converted to NVFP4. options: as `Options.of` takes them."""
    return built_converted(config, Options.of("nvfp4", options))


class BlockwiseConverter(QuantizationConverter):
    """A converter for `model_registry(flavor, converters=[BlockwiseConverter.Config(...)])`."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """format: "fp8" or "nvfp4". options: as `Options.of` takes them."""

        format: str = "fp8"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config):
        self.options = Options.of(config.format, config.options)

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        return built_converted(model_config, self.options)


class SelectiveACOfProducts(SelectiveAC):
    """Selective activation checkpointing that saves the products of converted layers too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | set(sac_save_list())


@override(target=SelectiveAC.Config, exact=True, description="saves products of converted layers")
def selective_ac(config: SelectiveAC.Config) -> SelectiveACOfProducts.Config:
    """Selective activation checkpointing that saves products, and so does not run them again in backward."""
    return derive(config, SelectiveACOfProducts.Config)
