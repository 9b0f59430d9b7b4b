"""torchao_blockwise: train transformers in blockwise FP8 and NVFP4 with PyTorch and torchao."""

from torchao_blockwise import _versions

try:
    from torchao_blockwise._compat import torchao_import  # noqa: F401, I001  # before all that imports torchao
    from torchao_blockwise import checkpoint, distributed, formats, ops
    from torchao_blockwise.conversion import (
        BlockwiseFP8TrainingConfig,
        NVFP4TrainingConfig,
        conversion_report,
        dry_run,
        experts,
        fuse,
        fusion_report,
        is_linear,
        keep_last_blocks,
        linears_and_experts,
        load_recipe_state,
        min_features,
        recipe_state,
        recommended_layers,
        skip_fqns,
        skip_lm_head,
        skip_routers,
        unconvert,
    )
    from torchao_blockwise.nn import NormLinear, linear, sac_save_list
    from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, weights_unchanged
except Exception:
    # If the import failed because a package is too old, report the version instead of a missing name.
    _versions.check()
    raise

__version__ = "0.2.0"

__all__ = [
    "BlockwiseFP8Tensor",
    "BlockwiseFP8TrainingConfig",
    "MasterWeightTensor",
    "NVFP4Tensor",
    "NVFP4TrainingConfig",
    "NormLinear",
    "checkpoint",
    "conversion_report",
    "distributed",
    "dry_run",
    "experts",
    "formats",
    "fuse",
    "fusion_report",
    "is_linear",
    "keep_last_blocks",
    "linear",
    "linears_and_experts",
    "load_recipe_state",
    "min_features",
    "ops",
    "recipe_state",
    "recommended_layers",
    "sac_save_list",
    "skip_fqns",
    "skip_lm_head",
    "skip_routers",
    "unconvert",
    "weights_unchanged",
]
