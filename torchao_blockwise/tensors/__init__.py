"""Tensor subclasses for quantized weights and for master weights, which are quantized when they are used."""

import torch

from torchao_blockwise.tensors import quantized_ops  # noqa: F401  # registers them
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.config import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, TrainingConfig
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.quantized import QuantizedTensor
from torchao_blockwise.tensors.quantized_shard import QuantizedShard
from torchao_blockwise.tensors.transposed_weight import TransposedWeight
from torchao_blockwise.tensors.unchanged import weights_unchanged

# Classes that `torch.load(weights_only=True)` may create.
torch.serialization.add_safe_globals([BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, QuantizedShard])

__all__ = [
    "BlockwiseFP8Tensor",
    "BlockwiseFP8TrainingConfig",
    "MasterWeightTensor",
    "NVFP4Tensor",
    "NVFP4TrainingConfig",
    "QuantizedShard",
    "QuantizedTensor",
    "TrainingConfig",
    "TransposedWeight",
    "weights_unchanged",
]
