"""Conversion with `quantize_`: configs, filters, handlers and reports."""

from torchao_blockwise.conversion.default_filter import recommended_layers
from torchao_blockwise.conversion.filters import (
    Filter,
    custom,
    experts,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    min_features,
    skip_fqns,
    skip_lm_head,
    skip_routers,
)
from torchao_blockwise.conversion.fusion import FusionReport, ModuleReport, fuse, fusion_report
from torchao_blockwise.conversion.handlers import convert_module, unconvert, why_not_convertible
from torchao_blockwise.conversion.recipe_states import load_recipe_state, recipe_state
from torchao_blockwise.conversion.report import ConversionReport, LayerReport, conversion_report, dry_run
from torchao_blockwise.tensors import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig

__all__ = [
    "BlockwiseFP8TrainingConfig",
    "ConversionReport",
    "Filter",
    "FusionReport",
    "LayerReport",
    "ModuleReport",
    "NVFP4TrainingConfig",
    "conversion_report",
    "convert_module",
    "custom",
    "dry_run",
    "experts",
    "fuse",
    "fusion_report",
    "is_linear",
    "keep_last_blocks",
    "linears_and_experts",
    "load_recipe_state",
    "min_features",
    "recipe_state",
    "recommended_layers",
    "skip_fqns",
    "skip_lm_head",
    "skip_routers",
    "unconvert",
    "why_not_convertible",
]
