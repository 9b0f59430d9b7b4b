"""Operations. Each one checks its arguments, has a schema and a fake implementation, and selects a backend."""

from torchao_blockwise._names import refusing_removed
from torchao_blockwise.formats import StochasticRounding
from torchao_blockwise.ops.backend import Backend, casting_backend, get_backend
from torchao_blockwise.ops.dequantization import dequantize
from torchao_blockwise.ops.fused import (
    Norm,
    norm_quantize,
    norm_statistics,
    normalize,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from torchao_blockwise.ops.gemm.grouped import add_grouped_matmul_, grouped_matmul
from torchao_blockwise.ops.gemm.plain import add_matmul_, matmul
from torchao_blockwise.ops.groups.permutation import permute, unpermute, unpermute_backward
from torchao_blockwise.ops.groups.tables import make_groups
from torchao_blockwise.ops.quantization import next_rounding_bits, quantize, quantize_by
from torchao_blockwise.ops.shards import merge_shards_
from torchao_blockwise.ops.shards.flat import shard_entries
from torchao_blockwise.ops.transposition import transpose

__all__ = [
    "Backend",
    "Norm",
    "StochasticRounding",
    "add_grouped_matmul_",
    "add_matmul_",
    "casting_backend",
    "dequantize",
    "get_backend",
    "grouped_matmul",
    "make_groups",
    "matmul",
    "merge_shards_",
    "next_rounding_bits",
    "norm_quantize",
    "norm_statistics",
    "normalize",
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
]

_CAST = "distributed.cast_master_weights_to_fp8 or cast_master_weights_to_nvfp4"
# {name that version 0.2 removed: what to use instead}
_REMOVED = {
    "grouped_quantize": "ops.quantize(x, fmt, groups=ends)",
    "transpose_many": "ops.transpose for each operand",
    "draws_for": "ops.next_rounding_bits",
    "NormStatistics": "ops.Norm",
    "partial_block_amax": _CAST,
    "block_scales_": _CAST,
    "partial_cast_": _CAST,
    "whole_block_cast_": _CAST,
}
__getattr__ = refusing_removed(__name__, _REMOVED)
