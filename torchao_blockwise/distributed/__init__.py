"""Distributed: what shards need. Scales of weights that FSDP2 shards, and the cast of sharded master weights."""

from torchao_blockwise.distributed.expert_parallel import ExpertParallel, combine_tokens, dispatch_tokens
from torchao_blockwise.distributed.master_weight_optimizer import MasterWeightOptimizer
from torchao_blockwise.distributed.master_weights import (
    cast_master_weights,
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
)
from torchao_blockwise.distributed.weight_scales import sync_weight_scales

__all__ = [
    "ExpertParallel",
    "MasterWeightOptimizer",
    "cast_master_weights",
    "cast_master_weights_to_fp8",
    "cast_master_weights_to_nvfp4",
    "combine_tokens",
    "dispatch_tokens",
    "sync_weight_scales",
]
