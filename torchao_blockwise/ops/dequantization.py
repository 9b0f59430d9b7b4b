"""Dequantize a block-scaled payload to high precision."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.operands import check_operand
from torchao_blockwise.ops.quantization.reference import expand_blocks
from torchao_blockwise.ops.registry import Operation, operand


def dequantize(x: Operand, *, dtype: torch.dtype = torch.float32, columns: int | None = None) -> torch.Tensor:
    """Return qdata · scale [· global_scale], computed in fp32 and rounded once to `dtype`.

    x: a result of `quantize`, qdata [.., M, packed(K)].
    columns: K, needed if it is odd and elements are packed two in a byte; by default all columns of the payload.
    Returns [.., M, K].
    Raises TypeError if `x` is not a quantized operand or `dtype` is not floating point, ValueError for `columns`.
    """
    check_operand("dequantize", "x", x)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"dequantize: dtype must be bfloat16, float16, float32 or float64, got {dtype}")
    held = x.qdata.shape[-1] * x.format.element.per_byte
    columns = held if columns is None else columns
    if x.global_scale is not None and x.global_scale.dim() and x.global_scale.shape != x.qdata.shape[:-2]:
        got = f"{list(x.global_scale.shape)} for payload of shape {list(x.qdata.shape)}"
        raise ValueError(
            f"dequantize: global_scale must be a scalar or have one value for each matrix of x, got {got}; for tokens "
            "in groups, dequantize the rows of each group with its own scale"
        )
    if x.format.element.packed(columns) != x.qdata.shape[-1]:
        raise ValueError(f"dequantize: the payload has {held} columns, got columns={columns}")
    return dequantize_op(x, columns, dtype)


def reference(x: Operand, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """x ≈ qdata · scale [· global_scale] in eager torch: [.., M, columns]."""
    fmt, elements = x.format, x.format.element.decode(x.qdata, columns)
    grid = x.scale.float().mT if fmt.transposed_scales else x.scale.float()
    values = elements * expand_blocks(grid, fmt, *elements.shape[-2:])
    # One scale for all matrices, or one for each.
    return (values if x.global_scale is None else values * x.global_scale[..., None, None]).to(dtype)


dequantize_op = Operation(
    f"dequantize({operand('x')}, SymInt columns, ScalarType dtype) -> Tensor",
    takes=(Operand, None, None),
    table=[Implementation(Backend.REFERENCE, reference)],
    fake=lambda x, columns, dtype: x.qdata.new_empty((*x.qdata.shape[:-1], columns), dtype=dtype),
)
