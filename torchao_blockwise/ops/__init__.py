"""Operations: what is computed. Each checks, has a schema, a fake and a sharding rule, and picks an implementation."""

from torchao_blockwise.formats import StochasticRounding
from torchao_blockwise.ops.backend import Backend, casting_backend, get_backend
from torchao_blockwise.ops.dequantization import dequantize
from torchao_blockwise.ops.fused.norm import NormStatistics, norm_quantize, norm_statistics, normalize
from torchao_blockwise.ops.fused.swiglu import swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_quantize
from torchao_blockwise.ops.gemm.grouped import add_grouped_matmul_, grouped_matmul
from torchao_blockwise.ops.gemm.plain import add_matmul_, matmul
from torchao_blockwise.ops.groups.permutation import permute, unpermute, unpermute_backward
from torchao_blockwise.ops.groups.tables import make_groups
from torchao_blockwise.ops.quantization import draws_for, quantize, quantize_by
from torchao_blockwise.ops.shards.flat import shard_entries
from torchao_blockwise.ops.shards.merge import merge_shards_
from torchao_blockwise.ops.shards.partial_cast import (
    block_scales_,
    partial_block_amax,
    partial_cast_,
    whole_block_cast_,
)
from torchao_blockwise.ops.transposition import transpose

__all__ = [
    "Backend",
    "NormStatistics",
    "StochasticRounding",
    "add_grouped_matmul_",
    "add_matmul_",
    "block_scales_",
    "casting_backend",
    "dequantize",
    "draws_for",
    "get_backend",
    "grouped_matmul",
    "make_groups",
    "matmul",
    "merge_shards_",
    "norm_quantize",
    "norm_statistics",
    "normalize",
    "partial_block_amax",
    "partial_cast_",
    "permute",
    "quantize",
    "quantize_by",
    "shard_entries",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "transpose",
    "unpermute",
    "unpermute_backward",
    "whole_block_cast_",
]
