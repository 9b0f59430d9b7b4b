"""Dequantise: block-scaled payload back to high precision."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import get_format
from torchao_blockwise.ops.dequantize import reference
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.operand import format_of, is_operand


def dequantize(x, *, dtype: torch.dtype = torch.float32, columns: int | None = None) -> torch.Tensor:
    """x ≈ qdata · scale [· global_scale], computed in fp32 and rounded once to `dtype`.

    x: a result of `quantize`, qdata [.., M, packed(K)].
    columns: K, where it is odd and elements are packed two a byte; default all that the payload holds.
    Returns [.., M, K].
    Raises TypeError if `x` is not a quantised operand or `dtype` is not floating point, ValueError for `columns`.
    """
    if not is_operand(x):
        raise TypeError(f"dequantize: x must be a result of quantize, got {type(x).__name__}")
    fmt = format_of(x)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"dequantize: dtype must be bfloat16, float16, float32 or float64, got {dtype}")
    held = x.qdata.shape[-1] * fmt.element.per_byte
    columns = held if columns is None else columns
    if fmt.element.packed(columns) != x.qdata.shape[-1]:
        raise ValueError(f"dequantize: the payload holds {held} columns, got columns={columns}")
    return dequantize_op(x.qdata, x.scale, x.global_scale, fmt.name, columns, dtype)


def _dequantize(qdata, scale, global_scale, format, columns, dtype):
    return reference.dequantize(qdata, scale, global_scale, get_format(format), columns, dtype)


def _dequantize_fake(qdata, scale, global_scale, format, columns, dtype):
    return qdata.new_empty((*qdata.shape[:-1], columns), dtype=dtype)


def _dequantize_sharding(qdata, scale, global_scale, format, columns, dtype):
    from torch.distributed.tensor import Replicate

    tensors = [Replicate(), Replicate(), None if global_scale is None else Replicate()]
    return [([Replicate()], [*tensors, None, None, None])]


dequantize_op = define_op(
    "dequantize(Tensor qdata, Tensor scale, Tensor? global_scale, str format, SymInt columns, ScalarType dtype)"
    " -> Tensor",
    _dequantize,
    _dequantize_fake,
    _dequantize_sharding,
)
