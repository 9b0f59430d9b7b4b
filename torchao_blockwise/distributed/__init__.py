"""Distributed training. All sharded quantized weights use the same cast (`cast.py`).

cast.py              amaxes of blocks, one MAX over the ranks, scales, payload
master_weights.py    the cast for masters that a program has split itself
fsdp.py              weights that FSDP2 shards: when they are cast
zero/                MasterWeightOptimizer: masters of quantized Parameters, whole or split over ranks
expert_parallel.py   experts that are distributed over ranks, and the exchange of their tokens
rank_consistency.py  checks that ranks agree, and errors that name missing ranks if a collective fails
"""

from torchao_blockwise.distributed.expert_parallel import ExpertParallel, combine_tokens, dispatch_tokens
from torchao_blockwise.distributed.fsdp import sync_weight_scales
from torchao_blockwise.distributed.master_weights import (
    cast_master_weights,
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
)
from torchao_blockwise.distributed.zero import MasterWeightOptimizer

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
