"""Operations: what is computed. Each checks, has a schema, a fake and a sharding rule, and picks an implementation."""

from torchao_blockwise.ops.backend import Backend, casting_backend, get_backend
from torchao_blockwise.ops.dequantize import dequantize
from torchao_blockwise.ops.flat_shards import shard_entries
from torchao_blockwise.ops.group_tables import make_groups
from torchao_blockwise.ops.grouped_matmul import add_grouped_matmul_, grouped_matmul
from torchao_blockwise.ops.grouped_quantize import grouped_quantize, quantize_by
from torchao_blockwise.ops.matmul import add_matmul_, matmul
from torchao_blockwise.ops.merge_shards import merge_shards_
from torchao_blockwise.ops.norm_quantize import NormStatistics, norm_quantize, norm_statistics, normalize
from torchao_blockwise.ops.partial_cast import block_scales_, partial_block_amax, partial_cast_
from torchao_blockwise.ops.permute import permute, unpermute, unpermute_backward
from torchao_blockwise.ops.quantize import quantize
from torchao_blockwise.ops.swiglu_quantize import swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_quantize
from torchao_blockwise.ops.transpose import transpose
from torchao_blockwise.ops.transpose_many import transpose_many

__all__ = [
    "Backend",
    "NormStatistics",
    "add_grouped_matmul_",
    "add_matmul_",
    "block_scales_",
    "casting_backend",
    "dequantize",
    "get_backend",
    "grouped_matmul",
    "grouped_quantize",
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
    "transpose_many",
    "unpermute",
    "unpermute_backward",
]
