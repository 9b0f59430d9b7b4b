"""Operations: what is computed. Each checks, has a schema, a fake and a sharding rule, and picks an implementation."""

from torchao_blockwise.ops.backend import Backend, casting_backend, get_backend
from torchao_blockwise.ops.dequantize import dequantize
from torchao_blockwise.ops.matmul import matmul
from torchao_blockwise.ops.operand import is_operand, operand, operand_type
from torchao_blockwise.ops.quantize import quantize
from torchao_blockwise.ops.transpose import transpose

__all__ = [
    "Backend",
    "casting_backend",
    "dequantize",
    "get_backend",
    "is_operand",
    "matmul",
    "operand",
    "operand_type",
    "quantize",
    "transpose",
]
